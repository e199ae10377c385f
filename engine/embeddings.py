"""From the hidden states of a prompt to one vector, and how a model wants that done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.errors import UnsupportedModel

if TYPE_CHECKING:
    from engine.types import Chunk

_GGUF_POOLINGS = {1: "mean", 3: "last"}
Vector = npt.NDArray[np.float32]


class Pool:
    """Gathers the final states of a sequence, chunk by chunk; begins anew where the sequence does."""

    __slots__ = ("_count", "_total", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._count = 0
        self._total: npt.NDArray[np.float64] = np.zeros(0)

    @property
    def needs_all(self) -> bool:
        """True where a token that is not computed, because a cache holds its keys, would be missed."""
        return self.kind == "mean"

    def add(self, start: int, states: Vector) -> None:
        """Take the states [tokens, hidden] of a chunk that begins at position `start`."""
        if self.kind == "last":
            self._count, self._total = 1, states[-1].astype(np.float64)
            return
        if start == 0:
            self._count, self._total = 0, np.zeros(states.shape[1])
        assert start == self._count, "a chunk of a pooled sequence is missing"
        self._count += len(states)
        self._total += states.sum(0, dtype=np.float64)

    def vector(self, dimensions: int | None = None) -> Vector:
        """The embedding, or its first dimensions, of length 1."""
        pooled = (self._total / max(self._count, 1))[:dimensions]
        length = float(np.linalg.norm(pooled))
        return (pooled / length if length else pooled).astype(np.float32)


def gather(chunks: Iterable[Chunk], states: Vector) -> None:
    """Hand the rows of a step's states, which lie in the order of its chunks, to the pools among them."""
    row = 0
    for chunk in chunks:
        if chunk.sequence.pool is not None:
            chunk.sequence.pool.add(chunk.start, states[row : row + chunk.count])
        row += chunk.count


def pooling_of(model: Path, metadata: Mapping[str, Any]) -> str | None:
    """What the model's own files say: sentence-transformers' modules in its folder, or a key of the GGUF header.

    None where they say nothing. Raises UnsupportedModel for what cannot be computed here.
    """
    arch = metadata.get("general.architecture")
    if arch is not None:
        kind = metadata.get(f"{arch}.pooling_type") or 0
        if kind and kind not in _GGUF_POOLINGS:
            raise UnsupportedModel(f"{arch}.pooling_type {kind} is not supported; mean (1) and last (3) are.")
        return _GGUF_POOLINGS.get(kind)
    folder = model if model.is_dir() else model.parent
    dense = [path.name for path in folder.glob("[0-9]*_Dense")]
    if dense:
        raise UnsupportedModel(f"{dense[0]} projects the model's embeddings, which is not supported.")
    path = folder / "1_Pooling" / "config.json"
    return _sentence_transformers(path) if path.is_file() else None


def _sentence_transformers(path: Path) -> str:
    """Of the modes that are on, there must be one, and one of ours."""
    raw = json.loads(path.read_text("utf-8"))
    modes = [name.removeprefix("pooling_mode_") for name, on in raw.items() if on is True and "pooling_mode_" in name]
    if isinstance(raw.get("pooling_mode"), str):  # the spelling since sentence-transformers 5
        modes = [raw["pooling_mode"]]
    names = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
    if len(modes) != 1 or modes[0] not in names:
        raise UnsupportedModel(f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported.")
    return names[modes[0]]
