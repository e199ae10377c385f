"""Weights and metadata from a GGUF file or a folder of safetensors. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import ModelError, UnsafeWeights, UnsupportedModel
from engine.model.config import ModelConfig, config_from_gguf, config_from_hf
from engine.model.decoder import LayerWeights, ModelWeights
from engine.model.gguf_file import GgufFile

PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
Progress = Callable[[float], None]

_ROPE_FACTORS = "rope_freqs.weight"
_GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "out": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


class Source(Protocol):
    """A bag of named tensors with the model's shape and tokenizer facts."""

    config: ModelConfig
    metadata: dict[str, Any]

    def has(self, name: str, layer: int | None = None) -> bool:
        """True when the tensor exists; names are the keys of the tables above."""
        ...

    def load(self, name: str, layer: int | None = None) -> Tensor:
        """The tensor as float32, or as stored when it is already floating point."""
        ...


@dataclass(slots=True)
class LoadedModel:
    """What the engine needs of a model on disk."""

    config: ModelConfig
    weights: ModelWeights
    metadata: dict[str, Any]
    path: Path


class GgufSource:
    """Tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.metadata = self._file.metadata
        if "token_embd.weight" not in self._file.tensors:
            raise UnsupportedModel("The GGUF file has no token_embd.weight.")
        vocab = self._file.tensors["token_embd.weight"].shape[0]
        factors = self._file.load(_ROPE_FACTORS).tolist() if _ROPE_FACTORS in self._file.tensors else None
        self.config = config_from_gguf(self.metadata, vocab, factors)

    def has(self, name: str, layer: int | None = None) -> bool:
        """See Source."""
        return self._full(name, layer) in self._file.tensors

    def load(self, name: str, layer: int | None = None) -> Tensor:
        """See Source; llama's query and key rows are put back into Hugging Face order."""
        full = self._full(name, layer)
        if full not in self._file.tensors:
            raise UnsupportedModel(f"The GGUF file lacks {full}.")
        tensor = torch.from_numpy(self._file.load(full))
        if self.config.architecture == "llama" and name in ("q", "k", "q_bias", "k_bias"):
            heads = self.config.num_heads if name[0] == "q" else self.config.num_kv_heads
            return _unpermute(tensor, heads)
        return tensor

    def _full(self, name: str, layer: int | None) -> str:
        return _GGUF_NAMES[name] if layer is None else f"blk.{layer}.{_GGUF_NAMES[name]}"


class SafetensorsSource:
    """Tensors of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            _refuse_pickle(folder)
            raise UnsupportedModel(f"{folder} holds no .safetensors file.")
        self.metadata = _read_json(folder / "config.json")
        self.config = config_from_hf(self.metadata)
        opened: list[Any] = [safe_open(str(path), framework="pt") for path in files]
        self._where = {name: file for file in opened for name in file.keys()}

    def has(self, name: str, layer: int | None = None) -> bool:
        """See Source; a stored head is ignored where the config ties it."""
        if name == "head" and self.metadata.get("tie_word_embeddings"):
            return False
        return self._full(name, layer) in self._where

    def load(self, name: str, layer: int | None = None) -> Tensor:
        """See Source."""
        full = self._full(name, layer)
        if full not in self._where:
            raise UnsupportedModel(f"The safetensors lack {full}.")
        tensor: Tensor = self._where[full].get_tensor(full)
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"{full} is {tensor.dtype}, not floating point.")
        return tensor

    def _full(self, name: str, layer: int | None) -> str:
        return _HF_NAMES[name] if layer is None else f"model.layers.{layer}.{_HF_NAMES[name]}"


def open_source(path: Path) -> Source:
    """Choose the reader by what is there. Raises ModelError, or UnsafeWeights for pickles."""
    if not path.exists():
        raise ModelError(f"There is no model at {path}.")
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        return GgufSource(ggufs[0]) if len(ggufs) == 1 else SafetensorsSource(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise UnsafeWeights(f"{path.name} is a pickle: reading it can run code. Convert it first.")
    if path.suffix == ".safetensors":
        return SafetensorsSource(path.parent)
    return GgufSource(path)


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device, progress: Progress = lambda done: None
) -> LoadedModel:
    """Open and read a model; progress is called with 0 … 1."""
    source = open_source(path)
    return LoadedModel(source.config, load_weights(source, dtype, device, progress), source.metadata, path)


def load_weights(source: Source, dtype: torch.dtype, device: torch.device, progress: Progress) -> ModelWeights:
    """Read all weights into `dtype` on `device`."""
    embedding = _matrix(source, None, dtype, device, "embed")
    layers = []
    for index in range(source.config.num_layers):
        layers.append(load_layer(source, index, dtype, device))
        progress((index + 1) / source.config.num_layers)
    head = _matrix(source, None, dtype, device, "head") if source.has("head") else embedding
    norm = source.load("norm").float().to(device)
    return ModelWeights(embedding, layers, norm, head)


def load_layer(source: Source, index: int, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    """One layer's weights in `dtype` on `device`."""

    def vector(name: str) -> Tensor:
        return source.load(name, index).float().to(device)

    def matrix(*names: str, layer: int = index) -> Tensor:
        return _matrix(source, layer, dtype, device, *names)

    bias = matrix("q_bias", "k_bias", "v_bias") if source.has("q_bias", index) else None
    return LayerWeights(
        attn_norm=vector("attn_norm"),
        qkv=matrix("q", "k", "v"),
        qkv_bias=bias,
        qk_norm=_qk_norm(source, index, vector),
        out=matrix("out"),
        mlp_norm=vector("mlp_norm"),
        gate_up=matrix("gate", "up"),
        down=matrix("down"),
    )


def _matrix(source: Source, layer: int | None, dtype: torch.dtype, device: torch.device, *names: str) -> Tensor:
    parts = [source.load(name, layer).to(dtype) for name in names]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous().to(device)


def _qk_norm(source: Source, index: int, vector: Callable[[str], Tensor]) -> Tensor | None:
    if not source.has("q_norm", index):
        return None
    heads, kv_heads = source.config.num_heads, source.config.num_kv_heads
    return torch.cat((vector("q_norm").expand(heads, -1), vector("k_norm").expand(kv_heads, -1)))


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each rotary head; undo that."""
    rest = tensor.shape[1:]
    return tensor.view(heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape)


def _refuse_pickle(folder: Path) -> None:
    pickles = [file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES]
    if pickles:
        raise UnsafeWeights(f"{folder} holds pickled weights only ({pickles[0]}): refused.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{path} is not a JSON object.")
    return data
