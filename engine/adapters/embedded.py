"""The embedded engine as a worker: `python -m engine serve …` on a Unix socket."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.adapters.base import AdapterError, Capabilities, Parameter, WorkerSpec, checked, checked_variables, scrubbed
from engine.config import DTYPES, FAULT_PHASES

PARAMETERS: dict[str, Parameter] = {
    "max_num_seqs": Parameter(
        "int",
        "Sequences that run in one step. More share the reading of the weights, and each takes KV blocks.",
        "On 2 cores with the bundled model: 82 tok/s at 1, 400 at 8, 704 at 32. Raise it until P99 or memory objects.",
        default=64,
        low=1,
        high=1024,
        unit="sequences",
    ),
    "max_num_batched_tokens": Parameter(
        "int",
        "Tokens of one step, prompts included. A longer prompt is taken in chunks, so running streams keep their pace.",
        "Smaller keeps the gap between tokens short while long prompts come in; larger reads prompts faster.",
        default=512,
        low=16,
        high=65536,
        unit="tokens",
    ),
    "num_blocks": Parameter(
        "int",
        "KV blocks in all: what all running sequences and the prefix cache share.",
        "By default room for 32 sequences of 2,048 tokens. A pool that is too small preempts; no request fails.",
        low=16,
        high=1 << 22,
        unit="blocks",
    ),
    "block_size": Parameter(
        "int",
        "Tokens of one KV block. Prefixes are shared in whole blocks.",
        "16 suits chat. A larger block shares less of short prefixes.",
        default=16,
        low=8,
        high=256,
        unit="tokens",
    ),
    "prefix_cache": Parameter(
        "bool",
        "Keep the KV blocks of prompts, so that a prompt that begins the same is not computed again.",
        "Costs nothing measurable where no prompt repeats. Tenants never share blocks.",
        default=True,
    ),
    "max_model_len": Parameter(
        "int",
        "Tokens of one sequence, prompt and answer together. Never more than the model was made for.",
        "A smaller window bounds what one request can take of the pool.",
        low=64,
        high=1 << 20,
        unit="tokens",
    ),
    "dtype": Parameter(
        "choice",
        "What weights are kept and computed in. auto: 4 bits where the file has them, else INT8; BF16 on other paths.",
        "On 2 cores at concurrency 1, INT8 reads about half the bytes of BF16 and is about twice as fast.",
        default="auto",
        choices=DTYPES,
    ),
    "max_queued": Parameter(
        "int",
        "Requests that may wait in the engine before it answers 503.",
        "The gateway sends no more than there are slots; this bounds what others send.",
        default=1024,
        low=1,
        high=65536,
        unit="requests",
    ),
}

CALLER_EXTRAS = frozenset(
    ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "structured_outputs")
)
"""Fields beyond OpenAI's that callers may send: what they cost is bounded, and they tell nothing of others."""

_OF_QUANTISATION = {"": "", "int8": "int8", "bf16": "bf16", "q4": "q4"}


class EmbeddedAdapter:
    """`python -m engine serve`, out of our own environment."""

    engine = "embedded"
    title = "the embedded engine"
    parameters = PARAMETERS
    variables: Mapping[str, str] = {
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "Kernels that oneDNN keeps, one for every shape of a step.",
    }
    extras = CALLER_EXTRAS
    capabilities = Capabilities(
        formats=frozenset({"gguf", "safetensors"}),
        quantisations=("", "int8", "bf16", "q4"),
        devices=frozenset({"cpu", "gpu"}),
        lends=True,
        tensor_parallel=False,
        tried=True,
    )
    writes_ready_file = True
    judges_itself = True
    cold_start_s = 10.0
    stats_paths = ("/stats",)
    facts_paths: tuple[str, ...] = ()

    def command(self, spec: WorkerSpec) -> list[str]:
        """The argv of a worker. Raises AdapterError for a parameter that is unknown or out of range."""
        values = checked(self, spec.parameters)
        if spec.tensor_parallel != 1:
            raise AdapterError("tensor_parallel: the embedded engine runs on one device.")
        if spec.quantisation not in _OF_QUANTISATION:
            raise AdapterError(f"quantisation {spec.quantisation} is not one that the embedded engine has.")
        if spec.quantisation:
            values["dtype"] = _OF_QUANTISATION[spec.quantisation]
        argv = [str(spec.python or sys.executable), "-m", "engine", "serve", "--model", str(spec.model_path)]
        argv += ["--served-model-name", spec.served_name, "--model-revision", spec.model_revision]
        argv += ["--uds", str(spec.uds), "--introspection-port", "0", "--ready-file", str(spec.ready_file)]
        argv += ["--threads", str(spec.threads), "--drain-seconds", f"{spec.drain_s:g}", "--log-json"]
        for name, value in values.items():
            argv += _option(name, value)
        for phase, seconds in spec.fault_delays.items():
            if phase in FAULT_PHASES:
                argv += ["--fault-delay", f"{phase}={seconds * 1000:g}"]
        return [*argv, *spec.arguments]

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        """A worker's whole environment. What it compiles at its first start is kept in `native` below the cache."""
        native = {} if spec.cache is None else {"FANLIGHT_NATIVE_CACHE": str(spec.cache / "native")}
        own = {
            "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus),  # none: it is placed on the CPU, whatever cards there are
            "OMP_NUM_THREADS": str(spec.threads),
            # One kernel is kept for every shape of a step; the default of 1024 of them grows to hundreds of megabytes.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
            **native,
        }
        # Its own pool of threads never spins for long; torch's does, unless told.
        waiting = {} if spec.exclusive_cores else {"OMP_WAIT_POLICY": "passive"}
        return scrubbed(spec, "embedded") | own | waiting | checked_variables(self, spec.environment)

    def facts(self, told: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing to add: its ready file has them."""
        return {}

    def stats(self, told: Mapping[str, str]) -> dict[str, Any]:
        """Its /stats as it is. Raises ValueError."""
        stats = json.loads(told["/stats"])
        if not isinstance(stats, dict):
            raise ValueError("/stats is no object")
        return stats


EMBEDDED = EmbeddedAdapter()


def command(spec: WorkerSpec) -> list[str]:
    """EMBEDDED.command, for who knows the engine."""
    return EMBEDDED.command(spec)


def environment(threads: int, native_cache: Path) -> dict[str, str]:
    """The environment of a worker with that many threads, without one of a deployment."""
    spec = WorkerSpec(Path(), "", "", Path(), Path(), threads, 0.0, {}, {})
    return EMBEDDED.environment(spec) | {"FANLIGHT_NATIVE_CACHE": str(native_cache)}


def _option(name: str, value: object) -> list[str]:
    if name == "prefix_cache":
        return [] if value else ["--no-prefix-cache"]
    return ["--" + name.replace("_", "-"), str(value)]
