"""The decoder: embeddings, layers, head. One call computes one mixed batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.nn.functional as F
from torch import Tensor

from engine.model.attention import AttentionGroup, KVCache, attend
from engine.model.config import ModelConfig
from engine.model.int8 import Int8Matrix
from engine.model.layers import Matrix, embed, gated_mlp, linear, rms_norm, rope_table, rotate

M = TypeVar("M", Tensor, Int8Matrix)


@dataclass(slots=True)
class LayerWeights(Generic[M]):
    """One layer; matrices are [out, in] in the compute dtype, or int8; norms are float32.

    qkv stacks query, key and value rows; gate_up stacks gate and up rows. qk_norm is
    [heads + kv_heads, head_dim] (Qwen3) or None.
    """

    attn_norm: Tensor
    qkv: M
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: M
    mlp_norm: Tensor
    gate_up: M
    down: M


AnyLayer = LayerWeights[Tensor] | LayerWeights[Int8Matrix]


@dataclass(slots=True)
class ModelWeights:
    """All weights; `head` is the embedding itself where they are tied."""

    embedding: Matrix
    layers: Seq[AnyLayer]
    norm: Tensor
    head: Matrix

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct tensors."""
        all_of_them = [self.embedding, self.norm, self.head]
        all_of_them += [getattr(layer, name) for layer in self.layers for name in LayerWeights.__slots__]
        return sum(_num_bytes(matrix) for matrix in {id(m): m for m in all_of_them if m is not None}.values())


def _num_bytes(matrix: Matrix) -> int:
    return matrix.num_bytes if isinstance(matrix, Int8Matrix) else matrix.numel() * matrix.element_size()


@dataclass(slots=True)
class Batch:
    """A step as tensors; `tokens`, `positions` and `slots` are [num_tokens] int64.

    `last` [num_samples] are the rows whose logits are wanted; with `pooled`, the final states of all rows are too.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    last: Tensor
    groups: Seq[AttentionGroup]
    pooled: bool = False


class Decoder:
    """Llama-family forward pass. The residual stream, norms and logits are float32."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_len: int) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._cos, self._sin = rope_table(config.rotary(), max_len, self.device)

    def forward(self, batch: Batch, cache: KVCache) -> tuple[Tensor, Tensor | None]:
        """Compute a batch and fill its KV slots.

        Returns logits [num_samples, vocab] and, if wanted, states after the last norm [tokens, hidden], both float32.
        """
        weights = self.weights
        x = embed(batch.tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            x = self.run_layer(index, layer, x, batch, cache)
        states = rms_norm(x, weights.norm, self.config.rms_eps) if batch.pooled else None
        x = rms_norm(x[batch.last], weights.norm, self.config.rms_eps).to(self.dtype)
        return linear(x, weights.head).float(), states

    def run_layer(self, index: int, layer: AnyLayer, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """The residual stream [tokens, hidden] float32 after one layer."""
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        normed = rms_norm(x, layer.attn_norm, self.config.rms_eps).to(self.dtype)
        x = x + self._attention(index, layer, normed, cos, sin, batch, cache)
        normed = rms_norm(x, layer.mlp_norm, self.config.rms_eps).to(self.dtype)
        return x + gated_mlp(normed, layer.gate_up, layer.down)

    def _attention(
        self,
        index: int,
        layer: AnyLayer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        cache: KVCache,
    ) -> Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
        turning = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            turning.copy_(self._norm_heads(turning, layer.qk_norm))
        rotate(turning, cos, sin)
        cache.write(index, batch.slots, qkv[:, heads:])
        return linear(attend(cache, index, qkv[:, :heads], batch.groups), layer.out)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        wide = heads.float()
        return F.rms_norm(wide, wide.shape[-1:], eps=self.config.rms_eps) * weight
