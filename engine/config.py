"""Everything an engine can be told, checked in one place.

ConfigError
└── raised by EngineConfig when a value is out of range or two values contradict each other
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigError

POOLINGS = ("mean", "last")
DTYPES = ("auto", "q4", "int8", "bf16", "fp32")
HOST_BYTES = 4 << 30
FAULT_PHASES = ("tokenize", "engine_queue", "prefill", "chunk", "decode", "hang", "deadlock")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; None means "from the model" or "from the machine"."""

    model: Path
    served_model_name: str | None = None
    model_revision: str = ""
    model_sha256: str | None = None
    pooling: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    max_queued: int = 1024
    max_queued_tokens: int = 1_048_576
    prefix_cache: bool = True
    faults: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least_one = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_queued", "max_queued_tokens")
        optional = ("threads", "num_blocks", "max_model_len")
        for name in at_least_one + optional:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        if (self.num_host_blocks or 0) < 0:
            raise ConfigError(f"num_host_blocks must be at least 0, not {self.num_host_blocks}.")
        if self.num_host_blocks and not self.prefix_cache:
            raise ConfigError("num_host_blocks needs the prefix cache: blocks are found on the host by their hash.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or decodes would starve."
            )
        self._check_words()
        self._check_window()

    @property
    def name(self) -> str:
        """The model name clients use."""
        return self.served_model_name or self.model.name.removesuffix(".gguf")

    @property
    def revision(self) -> str:
        """What the prefix hashes are rooted in, besides the tenant's salt."""
        return self.model_revision or self.name

    def resolved_threads(self) -> int:
        """Compute threads: as told, else the cores this process may use."""
        return self.threads or usable_cores()

    def resolved_blocks(self, max_position: int) -> int:
        """KV blocks: as told, else room for 32 sequences of 2,048 tokens and one full window."""
        wanted = max(32 * 2048, self.max_model_len or max_position)
        return self.num_blocks or -(-wanted // self.block_size)

    def resolved_host_blocks(self, num_blocks: int, block_bytes: int, device: str) -> int:
        """Host slots: as told, else as many as a card has blocks, within 4 GiB.

        On a CPU none: `num_blocks` more would cost the same memory and save the copies.
        """
        if self.num_host_blocks is not None:
            return self.num_host_blocks
        if device == "cpu" or not self.prefix_cache:
            return 0
        return min(num_blocks, HOST_BYTES // block_bytes)

    def resolved_window(self, max_position: int) -> int:
        """Tokens per sequence: as told, else the model's, never more than the pool holds."""
        if self.max_model_len is not None and self.max_model_len > max_position:
            raise ConfigError(f"max_model_len {self.max_model_len} exceeds the model's window of {max_position}.")
        room = self.resolved_blocks(max_position) * self.block_size
        return min(self.max_model_len or max_position, room)

    def _check_words(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.")
        if self.pooling not in (None, *POOLINGS):
            raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}, not {self.pooling!r}.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device must be auto, cpu or cuda, not {self.device!r}.")
        if self.model_sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", self.model_sha256):
            raise ConfigError(f"model_sha256 must be 64 hexadecimal digits, not {self.model_sha256!r}.")
        for phase in self.faults:
            if phase not in FAULT_PHASES:
                raise ConfigError(f"Unknown fault phase {phase!r}; known: {FAULT_PHASES}.")

    def _check_window(self) -> None:
        if self.num_blocks is None or self.max_model_len is None:
            return
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"{self.num_blocks} blocks of {self.block_size} hold fewer tokens than "
                f"max_model_len {self.max_model_len}."
            )


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process is bound to, or fewer where a container's quota gives it less time than that."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text("ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
