"""Memory of KV blocks goes back to the system: whole pages of those that are named, and no byte of another."""

from __future__ import annotations

import pytest
import torch

from engine.model.attention import KVCache
from engine.model.config import ModelConfig
from engine.model.fused import FusedCache
from engine.model.memory import give_back
from engine.server.service import rss_bytes

LAYERS, KV_HEADS, HEAD_DIM, BLOCKS, BLOCK = 8, 2, 64, 1024, 16


def cache_of(kind: str) -> KVCache | FusedCache:
    if kind == "torch":
        return KVCache(LAYERS, KV_HEADS, HEAD_DIM, BLOCKS, BLOCK, torch.bfloat16, torch.device("cpu"))
    return FusedCache(ModelConfig("llama", 8, 256, 512, LAYERS, 4, KV_HEADS, HEAD_DIM, 4096, 1e-5, 1e4), BLOCKS, BLOCK)


@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_named_blocks_become_zeros_and_take_no_memory(kind: str) -> None:
    cache = cache_of(kind)
    cache.block_view.fill_(1)
    before = rss_bytes()
    give_back(cache.block_view, [(256, 768)])
    assert cache.num_bytes == 64 << 20
    assert before - rss_bytes() > 0.9 * 0.75 * cache.num_bytes
    assert bool((cache.block_view[:, :256] == 1).all())
    assert not bool(cache.block_view[:, 258:-2].any()), "all but what shares a page with others"


@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("runs", [[(1, 1)], [(3, 5), (100, 2), (1023, 1)]])
def test_no_other_block_loses_a_byte(kind: str, runs: list[tuple[int, int]]) -> None:
    """Blocks need not be whole pages: what shares one with a block in use stays."""
    cache = cache_of(kind)
    cache.block_view.fill_(1)
    give_back(cache.block_view, runs)
    named = {block for first, count in runs for block in range(first, first + count)}
    others = [block for block in range(BLOCKS) if block not in named]
    assert bool((cache.block_view[:, others] == 1).all())
    cache.block_view.fill_(2)
    assert bool((cache.block_view == 2).all())
