"""Named tensors with the model's shape and tokenizer facts: a GGUF file, or a folder of safetensors. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import UnsafeWeights, UnsupportedModel
from engine.model.config import ModelConfig, config_from_gguf, config_from_hf
from engine.model.four_bit import FourBit, read_four_bit
from engine.model.gguf_file import GgufFile
from engine.model.names import HF_NAMES, ROPE_FACTORS, gguf_name, hf_name

PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
INDEX = "model.safetensors.index.json"


class Source(Protocol):
    """A model's files. Names are the keys of the tables in names.py.

    `tied`: the head is the embedding; `headless`: there is none, so that only hidden states come of it.
    """

    config: ModelConfig
    metadata: dict[str, Any]
    tied: bool
    headless: bool

    def has(self, name: str, layer: int | None = None) -> bool:
        """True when the tensor exists, and is used."""
        ...

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...] | None:
        """The tensor's shape, or None where there is none."""
        ...

    def load(self, name: str, layer: int | None = None) -> Tensor:
        """The tensor as float32, or as stored when it is already floating point."""
        ...

    def four_bit(self, name: str, layer: int | None = None) -> FourBit | None:
        """The matrix as the file stores it, where it stores it in 4 bits; rows in the order of `load`."""
        ...

    def full_name(self, name: str, layer: int | None = None) -> str:
        """The tensor's name in the file."""
        ...

    def stored(self) -> Collection[str]:
        """Names in the file of all that is there."""
        ...


class GgufSource:
    """Tensors of a GGUF file."""

    headless = False

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.metadata = self._file.metadata
        parts = self.metadata.get("split.count", 1)
        if parts > 1:
            raise UnsupportedModel(f"{path.name} is one of {parts} parts: join them with llama-gguf-split --merge.")
        if "token_embd.weight" not in self._file.tensors:
            raise UnsupportedModel("The GGUF file has no token_embd.weight.")
        vocab = self._file.tensors["token_embd.weight"].shape[0]
        factors = self._file.load(ROPE_FACTORS).tolist() if ROPE_FACTORS in self._file.tensors else None
        self.config = config_from_gguf(self.metadata, vocab, factors)
        self.tied = not self.has("head")

    def has(self, name: str, layer: int | None = None) -> bool:
        """See Source."""
        return self.full_name(name, layer) in self._file.tensors

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...] | None:
        """See Source."""
        info = self._file.tensors.get(self.full_name(name, layer))
        return None if info is None else info.shape

    def load(self, name: str, layer: int | None = None) -> Tensor:
        """See Source; llama's query and key rows are put back into Hugging Face order."""
        return self._ordered(name, torch.from_numpy(self._file.load(self.full_name(name, layer))))

    def four_bit(self, name: str, layer: int | None = None) -> FourBit | None:
        """See Source."""
        found = read_four_bit(*self._file.raw(self.full_name(name, layer)))
        return None if found is None else found.map(lambda rows: self._ordered(name, rows))

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        if self.config.architecture == "llama" and name in ("q", "k", "q_bias", "k_bias"):
            heads = self.config.num_heads if name[0] == "q" else self.config.num_kv_heads
            return _unpermute(rows, heads)
        return rows

    def full_name(self, name: str, layer: int | None = None) -> str:
        """See Source."""
        return gguf_name(name, layer)

    def stored(self) -> Collection[str]:
        """See Source."""
        return self._file.tensors.keys()


class SafetensorsSource:
    """Tensors of a Hugging Face folder, or of one file in it."""

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        files = [file] if file else _weight_files(folder)
        self.metadata = _read_json(folder / "config.json")
        self.config = config_from_hf(self.metadata)
        self._where = _index(files)
        if file is None and (folder / INDEX).is_file():
            _check_index(folder, self._where)
        # A decoder saved without its head, as embedding models are, lacks the outer name too.
        self.headless = HF_NAMES["embed"] in self._where
        self._prefix = "" if self.headless else "model."
        self.tied = self.headless or bool(self.metadata.get("tie_word_embeddings"))

    def has(self, name: str, layer: int | None = None) -> bool:
        """See Source; a stored head is ignored where the config ties it."""
        return not (name == "head" and self.tied) and self.full_name(name, layer) in self._where

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...] | None:
        """See Source."""
        full = self.full_name(name, layer)
        return tuple(self._where[full].get_slice(full).get_shape()) if full in self._where else None

    def load(self, name: str, layer: int | None = None) -> Tensor:
        """See Source."""
        full = self.full_name(name, layer)
        tensor: Tensor = self._where[full].get_tensor(full)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise UnsupportedModel(
                f"{full} is {tensor.dtype}; 16-bit and 32-bit floats are supported. vLLM reads more."
            )
        return tensor

    def four_bit(self, name: str, layer: int | None = None) -> FourBit | None:
        """See Source; safetensors hold floats."""
        return None

    def full_name(self, name: str, layer: int | None = None) -> str:
        """See Source."""
        return hf_name(name, layer, self._prefix)

    def stored(self) -> Collection[str]:
        """See Source."""
        return self._where.keys()


def _weight_files(folder: Path) -> list[Path]:
    """Files of the index, or the one file, or all there are. Raises UnsupportedModel, or UnsafeWeights for pickles."""
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UnsupportedModel(f"{missing[0]} is missing; {INDEX} lists it.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise UnsafeWeights(f"{folder} holds pickled weights only ({pickles[0]}): refused.")
        raise UnsupportedModel(f"{folder} holds no .safetensors file.")
    whole = folder / "model.safetensors"
    return [whole] if whole in files else files


def _index(files: list[Path]) -> dict[str, Any]:
    """The opened file of each tensor."""
    from safetensors import SafetensorError, safe_open

    where: dict[str, Any] = {}
    for path in files:
        try:
            opened: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(f"{path.name} is not a whole safetensors file: {error}") from error
        for name in opened.keys():
            if name in where:
                raise UnsupportedModel(f"{name} is in {path.name} and in another file as well.")
            where[name] = opened
    return where


def _weight_map(folder: Path) -> dict[str, str]:
    """File by tensor. Raises UnsupportedModel, also for files outside the folder."""
    found = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UnsupportedModel(f"{INDEX} has no weight_map.")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UnsupportedModel(f"{INDEX} names a file outside its folder: {name!r}.")
    return found


def _check_index(folder: Path, where: dict[str, Any]) -> None:
    for name, file in _weight_map(folder).items():
        if name not in where:
            raise UnsupportedModel(f"{name} is not in {file}, where {INDEX} has it.")


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each rotary head; undo that."""
    rest = tensor.shape[1:]
    return tensor.view(heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{path} is not a JSON object.")
    return data
