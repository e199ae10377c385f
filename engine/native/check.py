"""Runs a freshly built library on a small random model and compares it with plain torch; a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from engine.model.config import ModelConfig
from engine.model.decoder import LayerWeights
from engine.model.four_bit import BLOCK, FourBit
from engine.model.fused import Arena, FusedCache, FusedModel, FusedWeights, StoredLayer, pack, pack_layer
from engine.model.fused_loader import Loaded, verify
from engine.model.reference import Reference
from engine.native.library import open_library

TOKENS = 150


def main(path: Path) -> None:
    """Raises Disagreement when the library computes something else; crashes when it cannot run here."""
    torch.set_num_threads(1)
    library = open_library(path)
    for head_dim, four_bit in ((64, False), (64, True), (128, False), (128, True)):
        config = _config(head_dim)
        loaded = _random(config, qk_norm=head_dim == 128, four_bit=four_bit)
        cache = FusedCache(config, 8, 32)
        model = FusedModel(library, config, loaded.weights, cache, max_len=256, max_tokens=256, threads=2)
        distance = verify(model, loaded)
        model.close()
        target, kind = library.fl_target().decode(), "q4" if four_bit else "int8"
        sys.stdout.write(f"{target}: {kind}, head_dim {head_dim}, {distance:.5f} nats from plain torch\n")


def _config(head_dim: int) -> ModelConfig:
    return ModelConfig("llama", 333, 192, 320, 3, 6, 2, head_dim, 256, 1e-5, 10000.0)


def _random(config: ModelConfig, *, qk_norm: bool, four_bit: bool) -> Loaded:
    """Random weights, bias and all, of a size that keeps logits in the range of real ones."""
    generator = torch.Generator().manual_seed(7)
    stored = StoredLayer()

    def matrix(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, generator=generator).div_(k**0.5)

    def vector(*shape: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(*shape, generator=generator)

    hidden, wide, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    rows = heads + 2 * config.num_kv_heads * config.head_dim
    norm_heads = config.num_heads + config.num_kv_heads
    embedding, norm = matrix(config.vocab_size, hidden), vector(hidden)
    probe = torch.randint(config.vocab_size, (TOKENS,), generator=generator).tolist()
    reference, arena, layers = Reference(config, probe, embedding, norm), Arena(), []
    for _ in range(config.num_layers):
        layer = LayerWeights(
            attn_norm=vector(hidden),
            qkv=matrix(rows, hidden),
            qkv_bias=matrix(1, rows)[0],
            qk_norm=vector(norm_heads, config.head_dim) if qk_norm else None,
            out=matrix(hidden, heads),
            mlp_norm=vector(hidden),
            gate_up=matrix(2 * wide, hidden),
            down=matrix(hidden, wide),
        )
        if four_bit:
            stored = StoredLayer(*(_rounded(m) for m in (layer.qkv, layer.out, layer.gate_up, layer.down)))
        reference.advance(layer)
        layers.append(pack_layer(layer, arena, stored))
    head = 4 * matrix(config.vocab_size, hidden)
    weights = FusedWeights(embedding.to(torch.bfloat16), layers, norm, pack(head, arena))
    return Loaded(weights, probe, reference.logits(head))


def _rounded(matrix: torch.Tensor) -> FourBit:
    """Round a matrix to 4 bits, in place, and return what it was rounded to."""
    blocks = matrix.view(len(matrix), -1, BLOCK)
    low, high = blocks.amin(-1).half(), blocks.amax(-1).half()
    scale = ((high - low) / 15).half()
    nibbles = ((blocks - low[..., None]) / scale[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    stored = FourBit(nibbles[..., :16] | nibbles[..., 16:] << 4, scale, low)
    matrix.copy_(stored.floats())
    return stored


if __name__ == "__main__":
    main(Path(sys.argv[1]))
