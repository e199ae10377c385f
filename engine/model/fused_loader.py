"""Reads a model into the fused path, and asks the plain path whether the result says the same.

Disagreement
└── raised when the fused path's distribution is too far from the plain path's
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.four_bit import FourBit, stack
from engine.model.fused import Arena, FusedModel, FusedWeights, StoredLayer, pack, pack_layer
from engine.model.loader import Progress, load_layer
from engine.model.reference import Reference, divergence
from engine.model.source import Source
from engine.native.library import DRAW, Step

MAX_DIVERGENCE = 0.1
"""Nats of mean KL that make a model refused: 8-bit rounding costs about 0.01, a wrong kernel more than 1."""


class Disagreement(Exception):
    """The fused path does not compute this model; the message has the figures."""


@dataclass(slots=True)
class Loaded:
    """Weights, and what the plain path says of the probe prompt: logits [tokens, vocab] float32."""

    weights: FusedWeights
    probe: list[int]
    expected: Tensor


def load_fused(source: Source, probe: list[int], progress: Progress, *, four_bit: bool) -> Loaded:
    """Pack all weights, running the plain path over `probe` on the way. Raises ModelError.

    With `four_bit`, matrices that the file has in 4 bits stay as they are; the others, and the head, become int8.
    """
    cpu, arena = torch.device("cpu"), Arena()
    embedding = source.load("embed").float()
    norm = source.load("norm").float()
    reference = Reference(source.config, probe, embedding, norm)
    layers = []
    for index in range(source.config.num_layers):
        layer = load_layer(source, index, torch.float32, cpu)
        reference.advance(layer)
        layers.append(pack_layer(layer, arena, _stored(source, index) if four_bit else None))
        progress((index + 1) / source.config.num_layers)
    head = source.load("head").float() if source.has("head") else embedding
    expected = reference.logits(head)
    kept = arena.keep(embedding.to(torch.bfloat16))
    return Loaded(FusedWeights(kept, layers, norm, pack(head, arena)), probe, expected)


def _stored(source: Source, layer: int) -> StoredLayer:
    """What of a layer can be packed without rounding."""

    def four_bit(*names: str) -> FourBit | None:
        parts = [part for name in names if (part := source.four_bit(name, layer)) is not None]
        return stack(parts) if len(parts) == len(names) else None

    return StoredLayer(four_bit("q", "k", "v"), four_bit("out"), four_bit("gate", "up"), four_bit("down"))


def verify(model: FusedModel, loaded: Loaded) -> float:
    """Mean KL of the fused path from the plain one over the probe. Raises Disagreement.

    Also runs the probe token by token, which must give the very same logits: answers may not depend on batching.
    """
    tokens = loaded.probe
    whole = logits_of(model, tokens, 0)
    distance = divergence(loaded.expected, whole[:, : loaded.expected.shape[1]])
    if not distance <= MAX_DIVERGENCE:
        raise Disagreement(f"its distribution is {distance:.3f} nats from the plain path's (at most {MAX_DIVERGENCE})")
    for position in range(max(0, len(tokens) - 4), len(tokens)):
        single = logits_of(model, tokens[position : position + 1], position)
        if not torch.equal(single[0], whole[position]):
            raise Disagreement("one token at a time it computes other logits than all at once")
    return distance


def logits_of(model: FusedModel, tokens: list[int], start: int) -> Tensor:
    """Logits [tokens, vocab] of a chunk, in the first blocks of a cache that has no other user."""
    count, vocab = len(tokens), model.config.vocab_size
    logits = torch.empty(count, vocab)
    blocks = np.arange(-(-(start + count) // model.cache.block_size), dtype=np.int32)
    greedy = np.zeros(count, DRAW)
    arrays = [_ints(tokens), _ints([start]), _ints([count]), _ints([0]), blocks, _ints(range(count)), greedy]
    arrays.append(np.empty(count, np.int32))
    masks = (c.c_void_p * count)()
    rows = (c.c_void_p * count)(*(logits[row].data_ptr() for row in range(count)))
    addresses = (array.ctypes.data for array in arrays)
    model.start(Step(1, count, *addresses, c.addressof(rows), None, c.addressof(masks), 1), (arrays, rows, masks))
    model.wait()
    return logits


def _ints(values: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(values, np.int32)
