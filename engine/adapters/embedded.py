"""The embedded engine as a worker: `python -m engine serve …` on a Unix socket."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.adapters.base import AdapterError, WorkerSpec
from engine.config import DTYPES, FAULT_PHASES

# Parameter of a deployment -> (option, lowest, highest). Nothing else reaches the command line.
_NUMBERS: dict[str, tuple[str, int, int]] = {
    "max_num_seqs": ("--max-num-seqs", 1, 1024),
    "max_num_batched_tokens": ("--max-num-batched-tokens", 16, 65536),
    "num_blocks": ("--num-blocks", 16, 1 << 22),
    "block_size": ("--block-size", 8, 256),
    "max_model_len": ("--max-model-len", 64, 1 << 20),
    "max_queued": ("--max-queued", 1, 65536),
}

CALLER_EXTRAS = frozenset(
    ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "structured_outputs")
)
"""Fields beyond OpenAI's that callers may send: what they cost is bounded, and they tell nothing of others."""


def command(spec: WorkerSpec) -> list[str]:
    """The argv of a worker. Raises AdapterError for a parameter that is unknown or out of range."""
    argv = [sys.executable, "-m", "engine", "serve", "--model", str(spec.model_path)]
    argv += ["--served-model-name", spec.served_name, "--model-revision", spec.model_revision]
    argv += [
        "--uds",
        str(spec.uds),
        "--introspection-port",
        "0",
        "--ready-file",
        str(spec.ready_file),
    ]
    argv += ["--threads", str(spec.threads), "--drain-seconds", f"{spec.drain_s:g}", "--log-json"]
    for name, value in spec.parameters.items():
        argv += _option(name, value)
    for phase, seconds in spec.fault_delays.items():
        if phase in FAULT_PHASES:
            argv += ["--fault-delay", f"{phase}={seconds * 1000:g}"]
    return argv


def environment(threads: int, native_cache: Path) -> dict[str, str]:
    """A worker's whole environment: no secret of Fanlight, no proxy, nothing of the shell that started it.

    What it compiles at its first start is kept in `native_cache`.
    """
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": str(threads),
        # One kernel is kept for every shape of a step; the default of 1024 of them grows to hundreds of megabytes.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "HF_HUB_OFFLINE": "1",
        "FANLIGHT_NATIVE_CACHE": str(native_cache),
        "PYTHONUNBUFFERED": "1",
    }


def _option(name: str, value: object) -> list[str]:
    if name == "prefix_cache" and isinstance(value, bool):
        return [] if value else ["--no-prefix-cache"]
    if name == "dtype" and value in DTYPES:
        return ["--dtype", str(value)]
    if name not in _NUMBERS:
        raise AdapterError(f"{name} is not a parameter of the embedded engine, or its value cannot be used.")
    option, low, high = _NUMBERS[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise AdapterError(f"{name} must be a whole number from {low} to {high}.")
    return [option, str(value)]
