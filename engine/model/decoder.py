"""The decoder: embeddings, layers, head. One call computes one mixed batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.attention import AttentionGroup, KVCache, attend
from engine.model.config import ModelConfig
from engine.model.layers import gated_mlp, rms_norm, rope_table, rotate


@dataclass(slots=True)
class LayerWeights:
    """One layer; matrices are [out, in] in the compute dtype, norms float32.

    qkv stacks query, key and value rows; gate_up stacks gate and up rows. qk_norm is
    [heads + kv_heads, head_dim] (Qwen3) or None.
    """

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class ModelWeights:
    """All weights; `head` is the embedding itself where they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct tensors."""
        tensors = {id(t): t for t in (self.embedding, self.norm, self.head)}
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[id(tensor)] = tensor
        return sum(t.numel() * t.element_size() for t in tensors.values())


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
        x = F.embedding(batch.tokens, weights.embedding).float()
        for index, layer in enumerate(weights.layers):
            x = self.run_layer(index, layer, x, batch, cache)
        states = rms_norm(x, weights.norm, self.config.rms_eps) if batch.pooled else None
        x = rms_norm(x[batch.last], weights.norm, self.config.rms_eps).to(self.dtype)
        return F.linear(x, weights.head).float(), states

    def run_layer(self, index: int, layer: LayerWeights, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """The residual stream [tokens, hidden] float32 after one layer."""
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        normed = rms_norm(x, layer.attn_norm, self.config.rms_eps).to(self.dtype)
        x = x + self._attention(index, layer, normed, cos, sin, batch, cache)
        normed = rms_norm(x, layer.mlp_norm, self.config.rms_eps).to(self.dtype)
        return x + gated_mlp(normed, layer.gate_up, layer.down)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        cache: KVCache,
    ) -> Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
        turning = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            turning.copy_(self._norm_heads(turning, layer.qk_norm))
        rotate(turning, cos, sin)
        cache.write(index, batch.slots, qkv[:, heads:])
        return F.linear(attend(cache, index, qkv[:, :heads], batch.groups), layer.out)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        wide = heads.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_eps)
        return wide * scale * weight
