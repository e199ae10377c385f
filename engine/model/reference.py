"""What the plain path says of a prompt, computed layer by layer while weights are read; none are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.attention import KVCache, plan_groups
from engine.model.config import ModelConfig
from engine.model.decoder import AnyLayer, Batch, Decoder, ModelWeights
from engine.model.layers import Matrix, embed, linear, rms_norm
from engine.sequence import Sequence
from engine.types import Chunk, SamplingParams

_CPU = torch.device("cpu")
_BLOCK = 16


class Reference:
    """The plain forward pass of one prompt in the embedding's type, fed one layer at a time."""

    def __init__(self, config: ModelConfig, tokens: list[int], embedding: Matrix, norm: Tensor) -> None:
        self._norm = norm
        count, dtype = len(tokens), embedding.dtype
        blocks = -(-count // _BLOCK)
        nothing = ModelWeights(embedding, [], norm, embedding)
        self._decoder = Decoder(config, nothing, count)
        self._cache = KVCache(1, config.num_kv_heads, config.head_dim, blocks, _BLOCK, dtype, _CPU)
        sequence = Sequence(0, tokens, SamplingParams(max_tokens=1))
        sequence.block_table = list(range(blocks))
        places = torch.arange(count)
        groups = plan_groups([Chunk(sequence, 0, count)], _BLOCK, config.group, dtype, _CPU)
        self._batch = Batch(torch.tensor(tokens), places, places, places, groups)
        self._x = embed(self._batch.tokens, embedding)

    @torch.inference_mode()
    def advance(self, layer: AnyLayer) -> None:
        """Run the next layer."""
        self._x = self._decoder.run_layer(0, layer, self._x, self._batch, self._cache)

    @torch.inference_mode()
    def logits(self, head: Matrix) -> Tensor:
        """[tokens, vocab] float32 after the last layer."""
        normed = rms_norm(self._x, self._norm, self._decoder.config.rms_eps)
        return linear(normed.to(head.dtype), head).float()


def divergence(reference: Tensor, logits: Tensor) -> float:
    """Mean Kullback-Leibler divergence in nats of `logits` from `reference`, both [tokens, vocab] float32."""
    truth, other = reference.log_softmax(-1), logits.log_softmax(-1)
    return float((truth.exp() * (truth - other)).sum(-1).mean())
