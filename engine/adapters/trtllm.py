"""TensorRT-LLM as a worker, as its documents say. Not yet run on a GPU: `capabilities.tried` stays False until it was.

It listens on a port and asks for no key, so it may only stand where nobody else reaches loopback.
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

PARAMETERS: dict[str, Parameter] = {
    "max_num_seqs": Parameter(
        "int",
        "Sequences that run in one step (max_batch_size).",
        "Not measured here. Engines are built for a size: larger takes more memory from the start.",
        default=128,
        low=1,
        high=4096,
        unit="sequences",
    ),
    "max_num_batched_tokens": Parameter(
        "int", "Tokens of one step, prompts included (max_num_tokens).", low=16, high=262144, unit="tokens"
    ),
    "gpu_memory_utilization": Parameter(
        "float",
        "Share of what is free after the weights that KV blocks take (kv_cache_free_gpu_memory_fraction).",
        "Not a share of the card, as with vLLM.",
        default=0.9,
        low=0.05,
        high=0.99,
        devices=("gpu",),
    ),
    "tensor_parallel": TENSOR_PARALLEL,
    "max_model_len": Parameter(
        "int", "Tokens of one sequence, prompt and answer together (max_seq_len).", low=64, high=1 << 22, unit="tokens"
    ),
}
_OPTIONS = {
    "max_num_seqs": "--max_batch_size",
    "max_num_batched_tokens": "--max_num_tokens",
    "gpu_memory_utilization": "--kv_cache_free_gpu_memory_fraction",
    "max_model_len": "--max_seq_len",
}


class TrtllmAdapter:
    """`trtllm-serve` out of a runtime's environment."""

    engine = "trtllm"
    title = "TensorRT-LLM"
    parameters = PARAMETERS
    variables: Mapping[str, str] = {}
    extras = frozenset(("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"))
    capabilities = Capabilities(
        formats=frozenset({"safetensors"}),
        quantisations=("",),  # checkpoints say it themselves
        devices=frozenset({"gpu"}),
        lends=False,
        tensor_parallel=True,
        tried=False,
        note="Not yet run on a GPU. Compiles for one kind of card at its start, which takes long. Tells its steps only "
        "where a file for --extra_llm_api_options says enable_iter_perf_stats.",
        source="TensorRT-LLM: docs/source/commands/trtllm-serve/trtllm-serve.rst at 5c0c175",
    )
    writes_ready_file = False
    judges_itself = False
    cold_start_s = 600.0
    stats_paths = ("/metrics",)
    facts_paths = ("/v1/models", "/version")

    def command(self, spec: WorkerSpec) -> list[str]:
        """The argv of a worker. Raises AdapterError."""
        values = {"max_num_seqs": 128} | checked(self, spec.parameters)
        if spec.quantisation:
            raise AdapterError(f"quantisation {spec.quantisation}: TensorRT-LLM takes checkpoints as they are stored.")
        if spec.python is None:
            raise AdapterError("runtime: TensorRT-LLM runs in an environment of its own; name an installed runtime.")
        argv = [str(spec.python.parent / "trtllm-serve"), str(spec.model_path), "--backend", "pytorch"]
        argv += ["--served_model_name", spec.served_name, "--host", "127.0.0.1", "--port", str(spec.port)]
        argv += ["--tp_size", str(spec.tensor_parallel)] if spec.tensor_parallel > 1 else []
        for name, value in values.items():
            argv += [_OPTIONS[name], f"{value:g}" if isinstance(value, float) else str(value)]
        return [*argv, *spec.arguments]

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        """A worker's whole environment."""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(spec.gpus)}
        return scrubbed(spec, "trtllm") | own | checked_variables(self, spec.environment)

    def facts(self, told: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Facts of the worker; its blocks are told with the first step only. Raises ValueError."""
        return {
            "model": json.loads(told["/v1/models"])["data"][0]["id"],
            "max_model_len": int(parameters.get("max_model_len", 0)),
            "num_blocks": 0,
            "block_size": 0,
            "max_num_seqs": int(parameters.get("max_num_seqs", 128)),
            "max_num_batched_tokens": parameters.get("max_num_batched_tokens"),
            "kv_bytes": None,
            "engine_version": str(json.loads(told["/version"])["version"]),
        }

    def stats(self, told: Mapping[str, str]) -> dict[str, Any]:
        """The newest of its steps, in the keys of our own engine's /stats; it tells no totals of tokens.

        Its page empties itself: what it tells is what happened since it was last read. Raises ValueError.
        """
        steps = json.loads(told["/metrics"])
        if not isinstance(steps, list):
            raise ValueError("/metrics is no list")
        last = steps[-1] if steps else {}
        kv = last.get("kvCacheStats") or {}
        blocks, free = int(kv.get("maxNumBlocks", 0)), int(kv.get("freeNumBlocks", 0))
        size = int(kv.get("tokensPerBlock", 0))
        reused, missed = int(kv.get("reusedBlocks", 0)), int(kv.get("missedBlocks", 0))
        return {
            "steps": int(last.get("iter", 0)),
            "step_tokens": 0,
            "running": int(last.get("numActiveRequests", 0)),
            "waiting": int(last.get("numQueuedRequests", 0)),
            "kv_usage": round(1 - free / blocks, 6) if blocks else 0.0,
            "num_blocks": blocks,
            "free_blocks": free,
            "block_size": size,
            "prefix_query_tokens": (reused + missed) * size,
            "prefix_hit_tokens": reused * size,
            "prompt_tokens": 0,
            "generation_tokens": 0,
            "preemptions": 0,
        }


TRTLLM = TrtllmAdapter()
