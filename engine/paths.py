"""How a model is computed: the fused CPU path where it can be had, else plain torch, and the reason why not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.fused_runner import FusedRunner
from engine.model.attention import KVCache
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.fused import FusedCache, FusedModel, unsupported
from engine.model.fused_loader import Disagreement, load_fused, verify
from engine.model.hostpool import BlockStore, HostPool
from engine.model.loader import load_int8, load_weights
from engine.model.source import Source
from engine.native.build import NativeUnavailable, find_library
from engine.native.library import open_library
from engine.runner import TorchRunner
from engine.sampler import Sampler
from engine.tokenizer import Tokenizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROBE = (
    "A request waits in a queue until a worker has room. The worker reads the prompt in pieces, keeps the keys and "
    "values of every token in blocks, and then writes one token after another until the answer is complete."
)
"""What both paths compute when a model is loaded, to see whether they agree."""


@dataclass(slots=True)
class Path:
    """A loaded model on one of the paths; `passed_over` says why a faster one was not taken."""

    runner: TorchRunner | FusedRunner
    shape: ModelConfig
    weights_bytes: int
    dtype: str
    device: str
    target: str
    divergence: float | None = None
    passed_over: str | None = None

    def facts(self) -> dict[str, Any]:
        """What a supervisor wants to know once; `divergence` is in nats from plain float32."""
        facts: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "path": self.target}
        if self.divergence is not None:
            facts["divergence"] = round(self.divergence, 5)
        if self.passed_over is not None:
            facts["passed_over"] = self.passed_over
        return facts


def choose_path(config: EngineConfig, source: Source, tokenizer: Tokenizer, progress: Callable[[float], None]) -> Path:
    """Load the model on the best path that `dtype` and `device` allow. Raises ConfigError or ModelError."""
    source.config.check_window(config.resolved_window(source.config.max_position))
    device = choose_device(config.device)
    if config.dtype in DTYPES:
        return _plain(config, source, config.dtype, device, progress)
    why = None
    try:
        if device.type == "cpu":
            return _fused(config, source, tokenizer, progress)
        why = "the fused path runs on CPUs"
    except (NativeUnavailable, Disagreement) as error:
        why = str(error)
    if config.dtype == "q4":
        raise ConfigError(f"dtype q4 needs the fused path: {why}.")
    path = _plain(config, source, "bf16" if config.dtype == "auto" else "int8", device, progress)
    path.passed_over = why
    return path


def choose_device(name: str) -> torch.device:
    """`auto` takes a CUDA card if torch sees one. Raises ConfigError for one it does not see."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device is cuda, but torch sees no CUDA card.")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _fused(config: EngineConfig, source: Source, tokenizer: Tokenizer, progress: Callable[[float], None]) -> Path:
    shape = source.config
    reason = unsupported(shape, config.block_size, config.max_num_batched_tokens)
    if reason is not None:
        raise NativeUnavailable(f"this model does not fit it ({reason})")
    found = find_library()
    library = _open(found.path)
    cache = FusedCache(shape, config.resolved_blocks(shape.max_position), config.block_size)
    window = config.resolved_window(shape.max_position)
    room = min(config.max_num_batched_tokens, window)
    four_bit = config.dtype != "int8" and source.four_bit("down", 0) is not None
    if config.dtype == "q4" and not four_bit:
        raise ConfigError("dtype q4 takes 4-bit weights as they are; this model's are not stored as Q4_0 or Q4_1.")
    loaded = load_fused(source, tokenizer.encode(PROBE)[:room], progress, four_bit=four_bit)
    model = FusedModel(
        library,
        shape,
        loaded.weights,
        cache,
        max_len=window,
        max_tokens=config.max_num_batched_tokens,
        threads=config.resolved_threads(),
    )
    try:
        divergence = verify(model, loaded)
    except Disagreement:
        model.close()
        raise
    runner = FusedRunner(model, Sampler(), _host_pool(config, cache, cache.num_blocks, cache.num_bytes, "cpu"))
    target = f"fused {library.fl_target().decode()}"
    notice = "; ".join(found.passed_over) or None
    dtype = "q4" if four_bit else "int8"
    return Path(runner, shape, loaded.weights.num_bytes, dtype, "cpu", target, divergence, notice)


def _open(path: Any) -> ctypes.CDLL:
    try:
        return open_library(path)
    except OSError as error:
        raise NativeUnavailable(f"{path.name} cannot be loaded: {error}") from error


def _plain(
    config: EngineConfig, source: Source, dtype: str, device: torch.device, progress: Callable[[float], None]
) -> Path:
    shape = source.config
    computed = DTYPES.get(dtype, torch.bfloat16)
    load = load_int8 if dtype == "int8" else load_weights
    weights = load(source, computed, device, progress)
    blocks = config.resolved_blocks(shape.max_position)
    cache = KVCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, blocks, config.block_size, computed, device)
    decoder = Decoder(shape, weights, config.resolved_window(shape.max_position))
    host = _host_pool(config, cache, cache.num_blocks, cache.num_bytes, device.type)
    return Path(TorchRunner(decoder, cache, Sampler(), host), shape, weights.num_bytes, dtype, device.type, "plain")


def _host_pool(config: EngineConfig, cache: BlockStore, blocks: int, size: int, device: str) -> HostPool | None:
    slots = config.resolved_host_blocks(blocks, size // blocks, device)
    return HostPool(cache, slots) if slots else None
