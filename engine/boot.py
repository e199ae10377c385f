"""From settings to a warm engine: threads, weights, cache, tokenizer."""

from __future__ import annotations

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
from engine.errors import ConfigError
from engine.hostcache import HostCache
from engine.model.attention import KVCache
from engine.model.decoder import Decoder
from engine.model.hostpool import HostPool
from engine.model.loader import LoadedModel, load_model
from engine.runner import TorchRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.types import SamplingParams

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(slots=True)
class Engine:
    """A loaded, warmed engine that has not started stepping."""

    config: EngineConfig
    tokenizer: Tokenizer
    runner: TorchRunner
    scheduler: Scheduler
    max_model_len: int
    load_seconds: float

    @property
    def vocab_size(self) -> int:
        """Ids the model can embed."""
        return self.runner.decoder.config.vocab_size

    def facts(self) -> dict[str, Any]:
        """What a supervisor wants to know once."""
        decoder, pool = self.runner.decoder, self.scheduler.pool
        return {
            "model": self.config.name,
            "max_model_len": self.max_model_len,
            "num_blocks": pool.num_blocks,
            "block_size": pool.block_size,
            "num_host_blocks": self.scheduler.host.num_slots,
            "max_num_seqs": self.config.max_num_seqs,
            "load_seconds": round(self.load_seconds, 3),
            "weights_bytes": decoder.weights.num_bytes,
            "kv_bytes": self.runner.cache.num_bytes,
            "dtype": self.config.dtype,
            "device": decoder.device.type,
            "threads": torch.get_num_threads(),
            "engine_version": __version__,
        }


def build(config: EngineConfig, progress: Callable[[float], None] = lambda done: None) -> Engine:
    """Load and warm an engine. Raises ConfigError or ModelError."""
    began = time.monotonic()
    torch.set_num_threads(config.resolved_threads())
    # The event loop and the step thread share the GIL; the default 5 ms turn would show as jitter.
    sys.setswitchinterval(0.0005)
    device = choose_device(config.device)
    model = load_model(config.model, DTYPES[config.dtype], device, progress)
    window = config.resolved_window(model.config.max_position)
    runner = _runner(config, model, window, device)
    tokenizer = load_tokenizer(model)
    _warm_up(runner, config)
    gc.collect()
    gc.freeze()
    pool = BlockPool(runner.cache.num_blocks, config.block_size)
    scheduler = Scheduler(pool, _limits(config), HostCache(_host_blocks(config, runner.cache, device)))
    return Engine(config, tokenizer, runner, scheduler, window, time.monotonic() - began)


def choose_device(name: str) -> torch.device:
    """`auto` takes a CUDA card if torch sees one. Raises ConfigError for one it does not see."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device is cuda, but torch sees no CUDA card.")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _runner(config: EngineConfig, model: LoadedModel, window: int, device: torch.device) -> TorchRunner:
    shape = model.config
    cache = KVCache(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        config.resolved_blocks(shape.max_position),
        config.block_size,
        DTYPES[config.dtype],
        device,
    )
    slots = _host_blocks(config, cache, device)
    host = HostPool(cache, slots) if slots else None
    return TorchRunner(Decoder(shape, model.weights, window), cache, Sampler(), host)


def _host_blocks(config: EngineConfig, cache: KVCache, device: torch.device) -> int:
    return config.resolved_host_blocks(cache.num_blocks, cache.num_bytes // cache.num_blocks, device.type)


def _limits(config: EngineConfig) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_cache=config.prefix_cache,
    )


def _warm_up(runner: TorchRunner, config: EngineConfig) -> None:
    """Run a prompt and a few tokens, so that kernels are chosen before the first request."""
    size = min(config.block_size * runner.cache.num_blocks, 64)
    pool = BlockPool(runner.cache.num_blocks, config.block_size)
    scheduler = Scheduler(pool, SchedulerLimits(prefix_cache=False))
    params = SamplingParams(max_tokens=2, temperature=1.0)
    scheduler.add(Sequence(0, [0] * max(size - 2, 1), params))
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.complete(step, runner.sample(step, runner.forward(step)))
