"""From settings to a warm engine: threads, weights, cache, tokenizer."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine import __version__
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.embeddings import pooling_of
from engine.fused_runner import FusedRunner
from engine.hostcache import HostCache
from engine.model.checksums import verify_checksums
from engine.model.loader import open_source
from engine.paths import Path, choose_path
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.types import SamplingParams


@dataclass(slots=True)
class Engine:
    """A loaded, warmed engine that has not started stepping."""

    config: EngineConfig
    tokenizer: Tokenizer
    runner: TorchRunner | FusedRunner
    scheduler: Scheduler
    max_model_len: int
    load_seconds: float
    path: Path
    pooling: str | None
    headless: bool

    @property
    def vocab_size(self) -> int:
        """Ids the model can embed."""
        return self.path.shape.vocab_size

    def facts(self) -> dict[str, Any]:
        """What a supervisor wants to know once."""
        pool = self.scheduler.pool
        return {
            "model": self.config.name,
            "max_model_len": self.max_model_len,
            "num_blocks": pool.num_blocks,
            "block_size": pool.block_size,
            "num_host_blocks": self.scheduler.host.num_slots,
            "max_num_seqs": self.config.max_num_seqs,
            "load_seconds": round(self.load_seconds, 3),
            "weights_bytes": self.path.weights_bytes,
            "kv_bytes": self.runner.cache.num_bytes,
            "threads": self.config.resolved_threads(),
            "pooling": self.pooling,
            "engine_version": __version__,
            **self.path.facts(),
        }


def build(config: EngineConfig, progress: Callable[[float], None] = lambda done: None) -> Engine:
    """Load and warm an engine. Raises ConfigError or ModelError."""
    began = time.monotonic()
    torch.set_num_threads(config.resolved_threads())
    # The event loop and the step thread share the GIL; the default 5 ms turn would show as jitter.
    sys.setswitchinterval(0.0005)
    verify_checksums(config.model, config.model_sha256)
    source = open_source(config.model)
    pooling = config.pooling or pooling_of(config.model, source.metadata)
    tokenizer = load_tokenizer(source.metadata, config.model)
    path = choose_path(config, source, tokenizer, progress)
    runner = path.runner
    window = config.resolved_window(source.config.max_position)
    _warm_up(runner, config, window)
    _tidy_memory()
    host = HostCache(runner.host.num_slots if runner.host else 0)
    scheduler = Scheduler(BlockPool(runner.cache.num_blocks, config.block_size), _limits(config), host)
    seconds = time.monotonic() - began
    return Engine(config, tokenizer, runner, scheduler, window, seconds, path, pooling, source.headless)


def _limits(config: EngineConfig) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_cache=config.prefix_cache,
    )


def _tidy_memory() -> None:
    """Give back what loading needed, and let the collector skip what now stays for good."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _warm_up(runner: TorchRunner | FusedRunner, config: EngineConfig, window: int) -> None:
    """Run a prompt and a few tokens within the limits, so that kernels are chosen before the first request."""
    pool = BlockPool(runner.cache.num_blocks, config.block_size)
    scheduler = Scheduler(pool, _limits(config))
    tokens = min(2, window)
    params = SamplingParams(max_tokens=tokens, temperature=1.0)
    scheduler.add(Sequence(0, [0] * max(min(window, 64) - tokens, 1), params))
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.complete(step, runner.sample(step, runner.forward(step)))
