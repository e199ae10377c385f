"""Weights from files into the decoder's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError, UnsafeWeights
from engine.model.config import ModelConfig
from engine.model.decoder import LayerWeights, ModelWeights
from engine.model.int8 import Int8Matrix, quantise
from engine.model.source import PICKLE_SUFFIXES, GgufSource, SafetensorsSource, Source
from engine.model.tensors import check_tensors

Progress = Callable[[float], None]


@dataclass(slots=True)
class LoadedModel:
    """What the engine needs of a model on disk."""

    config: ModelConfig
    weights: ModelWeights
    metadata: dict[str, Any]
    path: Path


def open_source(path: Path) -> Source:
    """Choose the reader by what is there, and check that the tensors fit the config. Raises ModelError."""
    if not path.exists():
        raise ModelError(f"There is no model at {path}.")
    source = _open(path)
    check_tensors(source)
    return source


def _open(path: Path) -> Source:
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        return GgufSource(ggufs[0]) if len(ggufs) == 1 else SafetensorsSource(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise UnsafeWeights(f"{path.name} is a pickle: reading it can run code. Convert it first.")
    if path.suffix == ".safetensors":
        return SafetensorsSource(path.parent, path)
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


def load_int8(source: Source, dtype: torch.dtype, device: torch.device, progress: Progress) -> ModelWeights:
    """Read all weights into 8 bits per row on `device`; products are computed in `dtype`."""

    def matrix(tensor: Tensor) -> Int8Matrix:
        return quantise(tensor.float(), dtype)

    embedding = matrix(source.load("embed").to(device))
    layers = []
    for index in range(source.config.num_layers):
        read = load_layer(source, index, torch.float32, device)
        bias = None if read.qkv_bias is None else read.qkv_bias.to(dtype)
        qkv, out, gate_up, down = map(matrix, (read.qkv, read.out, read.gate_up, read.down))
        layers.append(LayerWeights(read.attn_norm, qkv, bias, read.qk_norm, out, read.mlp_norm, gate_up, down))
        progress((index + 1) / source.config.num_layers)
    head = matrix(source.load("head").to(device)) if source.has("head") else embedding
    return ModelWeights(embedding, layers, source.load("norm").float().to(device), head)


def load_layer(source: Source, index: int, dtype: torch.dtype, device: torch.device) -> LayerWeights[Tensor]:
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
