"""Norm, rotary positions and the gated MLP, as functions over flat token batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.int8 import Int8Matrix
from engine.model.rope import Rotary

Matrix = Tensor | Int8Matrix


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32 (x and weight are float32)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place.

    heads: [tokens, heads, head_dim]; cos: [tokens, 1, head_dim], sin: [tokens, 1, head_dim / 2],
    both float32. Pairs are (i, i + head_dim / 2), the Hugging Face layout.
    """
    half = sin.shape[-1]
    out = heads * cos
    out[..., :half].addcmul_(heads[..., half:], sin, value=-1)
    out[..., half:].addcmul_(heads[..., :half], sin)
    heads.copy_(out)


def rope_table(rotary: Rotary, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos [length, 1, head_dim] and sin [length, 1, head_dim / 2] for positions 0 … length − 1."""
    positions = torch.arange(length, dtype=torch.float64, device=device)
    angles = torch.outer(positions, torch.tensor(rotary.frequencies, dtype=torch.float64, device=device))
    cos, sin = (turned.mul_(rotary.magnitude).float() for turned in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1)[:, None], sin[:, None]


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, whatever the weights are kept in."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.multiply(x, bias)


def embed(tokens: Tensor, embedding: Matrix) -> Tensor:
    """Rows of the embedding as float32 [tokens, hidden]."""
    return F.embedding(tokens, embedding).float() if isinstance(embedding, Tensor) else embedding.lookup(tokens)


def gated_mlp(x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    """silu(x·gate) * (x·up) · down, with gate and up fused into one matrix."""
    both = linear(x, gate_up)
    half = both.shape[-1] // 2
    return linear(F.silu(both[:, :half]).mul_(both[:, half:]), down)
