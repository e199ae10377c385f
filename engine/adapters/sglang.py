"""SGLang as a worker, as its documents say. Not yet run on a GPU: `capabilities.tried` stays False until it was.

It listens on a port of loopback only, so a worker of it is started with a port and a key of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.adapters.base import (
    TENSOR_PARALLEL,
    AdapterError,
    Capabilities,
    Parameter,
    WorkerSpec,
    checked,
    checked_variables,
    scrubbed,
)
from engine.adapters.prometheus import read

PARAMETERS: dict[str, Parameter] = {
    "max_num_seqs": Parameter(
        "int",
        "Sequences that run in one step (max-running-requests).",
        "Not measured here. Raise it stepwise until P99 or memory objects.",
        default=128,
        low=1,
        high=4096,
        unit="sequences",
    ),
    "max_num_batched_tokens": Parameter(
        "int",
        "Tokens of one piece of a long prompt (chunked-prefill-size).",
        "Smaller keeps the gap between tokens short while long prompts come in.",
        low=16,
        high=262144,
        unit="tokens",
    ),
    "gpu_memory_utilization": Parameter(
        "float",
        "Share of the card for weights and KV together (mem-fraction-static).",
        "Its own advice: lower it when activations run out of memory.",
        default=0.88,
        low=0.05,
        high=0.99,
        devices=("gpu",),
    ),
    "enable_prefix_caching": Parameter(
        "bool",
        "Keep the KV of prompts in a radix tree, so that a prompt that begins the same is not computed again.",
        "What SGLang is chosen for: leave it on.",
        default=True,
    ),
    "block_size": Parameter(
        "choice", "Tokens of one KV block.", "1 shares most.", choices=("1", "16", "32", "64"), unit="tokens"
    ),
    "tensor_parallel": TENSOR_PARALLEL,
    "max_model_len": Parameter(
        "int", "Tokens of one sequence, prompt and answer together.", low=64, high=1 << 22, unit="tokens"
    ),
    "dtype": Parameter(
        "choice",
        "What weights that are not quantised are computed in.",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
    ),
    "kv_cache_dtype": Parameter(
        "choice",
        "What keys and values are kept in. fp8 halves the bytes of a token.",
        default="auto",
        choices=("auto", "fp8_e4m3", "fp8_e5m2"),
        devices=("gpu",),
    ),
}
QUANTISATIONS = ("", "fp8", "awq", "gptq")

_OPTIONS = {  # our name → its option
    "max_num_seqs": "--max-running-requests",
    "max_num_batched_tokens": "--chunked-prefill-size",
    "gpu_memory_utilization": "--mem-fraction-static",
    "block_size": "--page-size",
    "max_model_len": "--context-length",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
}
_METRICS = {  # key of /stats → metric; it tells no steps, so tokens stand for progress
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "prompt_tokens": "sglang:prompt_tokens_total",
    "generation_tokens": "sglang:generation_tokens_total",
    "prefix_hit_tokens": "sglang:cached_tokens_total",
    "preemptions": "sglang:num_retracted_requests_total",
}
_USAGE, _ROOM = "sglang:token_usage", "sglang:max_total_num_tokens"


class SglangAdapter:
    """`python -m sglang.launch_server` out of a runtime's environment."""

    engine = "sglang"
    title = "SGLang"
    parameters = PARAMETERS
    variables: Mapping[str, str] = {}
    extras = frozenset(("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"))
    capabilities = Capabilities(
        formats=frozenset({"safetensors"}),
        quantisations=QUANTISATIONS,
        devices=frozenset({"gpu"}),
        lends=False,
        tensor_parallel=True,
        tried=False,
        note="Not yet run on a GPU. Takes its KV pool at the start and cannot shrink it.",
        source="SGLang: docs/advanced_features/server_arguments and docs/references/production_metrics at 00b08c4",
    )
    writes_ready_file = False
    judges_itself = False
    cold_start_s = 120.0
    stats_paths = ("/metrics",)
    facts_paths = ("/metrics", "/v1/models", "/get_server_info")

    def command(self, spec: WorkerSpec) -> list[str]:
        """The argv of a worker. Raises AdapterError."""
        values = {"max_num_seqs": 128} | checked(self, spec.parameters)
        if spec.quantisation not in QUANTISATIONS:
            raise AdapterError(f"quantisation {spec.quantisation} is not one that SGLang is asked for here.")
        if spec.python is None:
            raise AdapterError("runtime: SGLang runs in an environment of its own; name an installed runtime.")
        argv = [str(spec.python), "-m", "sglang.launch_server", "--model-path", str(spec.model_path)]
        argv += ["--served-model-name", spec.served_name, "--host", "127.0.0.1", "--port", str(spec.port)]
        argv += ["--load-format", "safetensors", "--enable-metrics", "--enable-cache-report"]
        argv += ["--api-key", spec.key] if spec.key else []
        argv += ["--quantization", spec.quantisation] if spec.quantisation else []
        argv += ["--tp-size", str(spec.tensor_parallel)] if spec.tensor_parallel > 1 else []
        for name, value in values.items():
            if name == "enable_prefix_caching":
                argv += [] if value else ["--disable-radix-cache"]
            else:
                argv += [_OPTIONS[name], f"{value:g}" if isinstance(value, float) else str(value)]
        return [*argv, *spec.arguments]

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        """A worker's whole environment."""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(spec.gpus)}
        return scrubbed(spec, "sglang") | own | checked_variables(self, spec.environment)

    def facts(self, told: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Facts of the worker. Raises ValueError."""
        info = json.loads(told["/get_server_info"])
        block = int(info.get("page_size") or 1)
        room = int(read(told["/metrics"], (_ROOM,)).total(_ROOM) or info.get("max_total_num_tokens") or 0)
        return {
            "model": json.loads(told["/v1/models"])["data"][0]["id"],
            "max_model_len": int(info.get("context_length") or 0),
            "num_blocks": room // block,
            "block_size": block,
            "max_num_seqs": int(parameters.get("max_num_seqs", 128)),
            "max_num_batched_tokens": info.get("chunked_prefill_size"),
            "kv_bytes": None,
            "engine_version": str(info.get("version", "")),
        }

    def stats(self, told: Mapping[str, str]) -> dict[str, Any]:
        """What it does now, in the keys of our own engine's /stats. Raises ValueError."""
        samples = read(told["/metrics"], (*_METRICS.values(), _USAGE, _ROOM))
        if _METRICS["running"] not in samples:
            raise ValueError(f"Its metrics lack {_METRICS['running']}")
        stats: dict[str, Any] = {key: int(samples.total(name)) for key, name in _METRICS.items()}
        usage, blocks = samples.mean(_USAGE), int(samples.total(_ROOM))
        tokens = stats["prompt_tokens"] + stats["generation_tokens"]
        return stats | {
            "steps": tokens,
            "step_tokens": tokens,
            "prefix_query_tokens": stats["prompt_tokens"],
            "kv_usage": round(usage, 6),
            "num_blocks": blocks,
            "free_blocks": round(blocks * (1 - usage)),
            "block_size": 1,
        }


SGLANG = SglangAdapter()
