"""HostPool: bytes go out and come back, whatever the cache's layout; a swapped sequence says the same words."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.blocks import BlockPool
from engine.hostcache import HostCache
from engine.model.attention import KVCache
from engine.model.decoder import Decoder
from engine.model.hostpool import HostPool
from engine.model.loader import LoadedModel
from engine.runner import TorchRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer
from engine.types import SamplingParams

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@dataclass
class Flat:
    """A cache laid out [layer][block][bytes], as a compiled path may have it."""

    block_view: torch.Tensor


def filled(view: torch.Tensor) -> torch.Tensor:
    view.copy_(torch.randint(-100, 100, view.shape).to(view.dtype))
    return view.clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["paged", "flat"])
def test_blocks_come_back_as_they_were(layout: str, device: torch.device) -> None:
    paged = KVCache(3, 2, 8, 6, 4, torch.bfloat16, device)
    cache = paged if layout == "paged" else Flat(torch.zeros(3, 6, 64, dtype=torch.bfloat16, device=device))
    before = filled(cache.block_view)
    pool = HostPool(cache, 4)
    pool.copy_out([(5, 0), (1, 3)])
    cache.block_view.zero_()
    pool.copy_in([(3, 0), (0, 2)])
    assert torch.equal(cache.block_view[:, 0], before[:, 1])
    assert torch.equal(cache.block_view[:, 2], before[:, 5])
    assert not cache.block_view[:, [1, 3, 4, 5]].any()


def test_a_block_of_the_paged_cache_is_every_layers_keys_and_values() -> None:
    cache = KVCache(3, 2, 8, 6, 4, torch.float32, CPU)
    cache.block_view[:, 4] = 1.0
    assert cache.data[:, :, 4].all()
    assert cache.data.sum() == cache.data[:, :, 4].numel()
    assert HostPool(cache, 5).num_bytes == cache.num_bytes // 6 * 5


def words(
    model: LoadedModel, prompts: list[list[int]], num_blocks: int, slots: int
) -> tuple[list[list[int]], Scheduler]:
    """Greedy answers of 40 tokens from a pool of that size."""
    config = model.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, num_blocks, 16)
    kv = KVCache(*shape, model.weights.embedding.dtype, CPU)
    runner = TorchRunner(Decoder(config, model.weights, 512), kv, Sampler(), HostPool(kv, slots) if slots else None)
    scheduler = Scheduler(BlockPool(num_blocks, 16), SchedulerLimits(), HostCache(slots))
    sequences = [Sequence(at, ids, SamplingParams(40, temperature=0.0)) for at, ids in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.complete(step, runner.sample(step, runner.forward(step)))
    return [s.tokens[s.num_prompt :] for s in sequences], scheduler


def test_a_swapped_sequence_says_the_same_as_one_that_stayed(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    texts = ["The harbour lay quiet under a grey sky. " * n for n in (4, 5, 6, 5)]
    prompts = [tokenizer.encode(f"{chapter}: {text}") for chapter, text in zip("ABCD", texts, strict=True)]
    expected, roomy = words(loaded, prompts, 64, 0)
    got, tight = words(loaded, prompts, 12, 32)
    assert roomy.counts.preemptions.total() == 0
    assert tight.counts.preemptions["swap"] > 0
    assert tight.counts.swapped_in_blocks > 0
    assert got == expected
