"""vLLM as a worker: its OpenAI server on a Unix socket, in an environment of its own.

Read from and run with vLLM 0.32.0 (the build for CPUs); metric names as its /metrics gives them. A worker is a tree of
processes (server → engine core → worker): killing the first alone leaves the others behind.
"""

from __future__ import annotations

import json
import os
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
from engine.adapters.prometheus import Samples, read

DEFAULT_MAX_NUM_SEQS = 128
LONGEST_SOCKET = 107  # bytes of the path of a Unix socket
RPC_NAME = 37  # of which vLLM takes so many for a name of its own
DEFAULT_CPU_KV_BYTES = 1 << 30

PARAMETERS: dict[str, Parameter] = {
    "max_num_seqs": Parameter(
        "int",
        "Sequences that run in one step. More share the reading of the weights, and each takes KV blocks.",
        "Measured on 2 cores with a 135M model: 69 tok/s at 1, 405 at 8, 781 at 32. On a card, 256 for a 7B is where "
        "P99 usually begins to object: raise it stepwise until it does.",
        default=DEFAULT_MAX_NUM_SEQS,
        low=1,
        high=4096,
        unit="sequences",
    ),
    "max_num_batched_tokens": Parameter(
        "int",
        "Tokens of one step, prompts included. A longer prompt is taken in chunks, so running streams keep their pace.",
        "Smaller keeps the gap between tokens short while long prompts come in; larger reads prompts faster and takes "
        "more memory for activations.",
        low=16,
        high=262144,
        unit="tokens",
    ),
    "gpu_memory_utilization": Parameter(
        "float",
        "Share of the card's whole memory that vLLM takes at its start, weights and KV blocks together.",
        "0.85 to 0.92. Below, KV blocks are given away; above, a spike of activations ends in out of memory.",
        default=0.90,
        low=0.05,
        high=0.99,
        devices=("gpu",),
    ),
    "kv_cache_memory_bytes": Parameter(
        "int",
        "Bytes of KV blocks on a CPU, taken at the start.",
        "By default what the memory plan says, else 1 GiB: concurrency × tokens of a request × KV bytes of a token.",
        low=1 << 24,
        high=1 << 42,
        unit="bytes",
        devices=("cpu",),
    ),
    "enable_prefix_caching": Parameter(
        "bool",
        "Keep the KV blocks of prompts, so that a prompt that begins the same is not computed again.",
        "On unless no prompt ever repeats. Tenants never share blocks: the gateway salts their hashes.",
        default=True,
    ),
    "block_size": Parameter(
        "choice",
        "Tokens of one KV block. Prefixes are shared in whole blocks.",
        "On a CPU 32 or more: its kernels want multiples of 32, and by itself it takes 128, which shares nothing of "
        "prompts below that. On a card 16.",
        choices=("16", "32", "64", "128"),
        unit="tokens",
    ),
    "tensor_parallel": TENSOR_PARALLEL,
    "max_model_len": Parameter(
        "int",
        "Tokens of one sequence, prompt and answer together. Never more than the model was made for.",
        "vLLM starts only if the KV pool holds one whole sequence of this length: a smaller one needs less memory.",
        low=64,
        high=1 << 22,
        unit="tokens",
    ),
    "dtype": Parameter(
        "choice",
        "What weights that are not quantised are computed in.",
        "auto takes the model's own. float16 where the card knows no bfloat16.",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
    ),
    "kv_cache_dtype": Parameter(
        "choice",
        "What keys and values are kept in. fp8 halves the bytes of a token.",
        "auto keeps the model's precision. fp8 doubles what fits; evaluate before it takes traffic.",
        default="auto",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        devices=("gpu",),
    ),
    "max_num_queued_reqs": Parameter(
        "int",
        "Requests in the engine, running and waiting, above which it answers 503.",
        "The gateway sends no more than there are slots; this bounds what others send.",
        low=1,
        high=65536,
        unit="requests",
    ),
    "enforce_eager": Parameter(
        "bool",
        "Compile nothing at the start: ready sooner, every step slower.",
        "On 2 cores it saves most of two minutes of a first start. Leave it off for what serves for long.",
        default=False,
    ),
    "tool_call_parser": Parameter(
        "choice",
        "How this family of models writes tool calls; without one tools are refused.",
        "hermes for Qwen 2.5 and many others, llama3_json for Llama 3, mistral for Mistral.",
        choices=("hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek_v3", "granite", "pythonic"),
    ),
    "reasoning_parser": Parameter(
        "choice",
        "How this family of models marks what it thinks before it answers.",
        "deepseek_r1 for DeepSeek R1 and what was distilled from it, qwen3 for Qwen 3.",
        choices=("deepseek_r1", "qwen3", "granite", "mistral", "openai_gptoss"),
    ),
}

CALLER_EXTRAS = frozenset(
    ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "structured_outputs")
)
"""Never chat_template, mm or kv_transfer fields: those run or reach what callers must not."""

QUANTISATIONS = {
    "": (),  # as the model's config says: AWQ, GPTQ and FP8 checkpoints name themselves
    "fp8": ("--quantization", "fp8"),
    "int8": ("--quantization", "int8_per_channel_weight_only"),
    "awq": ("--quantization", "awq"),
    "gptq": ("--quantization", "gptq"),
}

_CACHE = "vllm:cache_config_info"
_COUNTERS = {  # key of /stats → counter of vLLM 0.32
    "steps": "vllm:iteration_tokens_total_count",
    "step_tokens": "vllm:iteration_tokens_total_sum",
    "prefix_query_tokens": "vllm:prefix_cache_queries_total",
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _FINISHED = "vllm:kv_cache_usage_perc", "vllm:request_success_total"
_REFUSED, _SLEEP = "vllm:admission_rejections_total", "vllm:engine_sleep_state"
_NAMES = (_CACHE, *_COUNTERS.values(), _RUNNING, _WAITING, _USAGE, _FINISHED, _REFUSED, _SLEEP)


class VllmAdapter:
    """`python -m vllm.entrypoints.openai.api_server` out of a runtime's environment."""

    engine = "vllm"
    title = "vLLM"
    parameters = PARAMETERS
    variables: Mapping[str, str] = {
        "VLLM_LOGGING_LEVEL": "How much it logs: DEBUG, INFO, WARNING, ERROR.",
        "VLLM_ENGINE_READY_TIMEOUT_S": "Seconds that its engine may take to start (600).",
        "OMP_NUM_THREADS": "Threads of one OpenMP region, on a CPU.",
    }
    extras = CALLER_EXTRAS
    capabilities = Capabilities(
        formats=frozenset({"safetensors"}),
        quantisations=tuple(QUANTISATIONS),
        devices=frozenset({"cpu", "gpu"}),
        lends=False,
        tensor_parallel=True,
        tried=True,
        note="Takes its KV pool at the start and cannot shrink it: its reserve is lent only while it is stopped.",
        source="vLLM 0.32.0: vllm/entrypoints/launchers/cli_args.py, engine/arg_utils.py, v1/metrics/loggers.py",
    )
    writes_ready_file = False
    judges_itself = False  # /health is 200 while the engine core is stuck; only a dead one is told
    cold_start_s = 170.0
    stats_paths = ("/metrics",)
    facts_paths = ("/metrics", "/version", "/v1/models")

    def command(self, spec: WorkerSpec) -> list[str]:
        """The argv of a worker. Raises AdapterError for a parameter that is unknown or out of range."""
        values = self._values(spec)
        if spec.python is None:
            raise AdapterError("runtime: vLLM runs in an environment of its own; name an installed runtime.")
        argv = [str(spec.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(spec.model_path)]
        argv += ["--served-model-name", spec.served_name, "--uds", str(spec.uds)]
        # What it tells of every request, and under which id; never code that comes with a model.
        argv += ["--enable-prompt-tokens-details", "--enable-per-request-metrics", "--enable-request-id-headers"]
        argv += ["--no-trust-remote-code", "--load-format", "safetensors", "--disable-uvicorn-access-log"]
        argv += ["--shutdown-timeout", f"{spec.drain_s:.0f}"]
        if spec.traces is not None:
            argv += ["--otlp-traces-endpoint", spec.traces[0]]
        argv += QUANTISATIONS[spec.quantisation]
        if spec.tensor_parallel > 1:
            argv += ["--tensor-parallel-size", str(spec.tensor_parallel)]
        for name, value in values.items():
            argv += _option(name, value)
        return [*argv, *spec.arguments]

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        """A worker's whole environment. What it compiles is kept below the cache, or every start is a first one."""
        own = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if len(os.fsencode(spec.sockets)) <= LONGEST_SOCKET - RPC_NAME:  # else in /tmp, as it does by itself
            own["VLLM_RPC_BASE_PATH"] = str(spec.sockets)
        if spec.cache is not None:
            own["TORCHINDUCTOR_CACHE_DIR"] = str(spec.cache / "vllm" / "inductor")
        if spec.traces is not None:
            own["OTEL_SERVICE_NAME"] = "vllm"
            own["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
            own["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] = f"authorization=Bearer%20{spec.traces[1]}"
            own["OTEL_BSP_SCHEDULE_DELAY"] = "1000"  # ms until a request's page has its span
        if spec.gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
        else:
            own["CUDA_VISIBLE_DEVICES"] = ""
            if spec.cores:
                own["VLLM_CPU_OMP_THREADS_BIND"] = _ranks(spec.cores, spec.tensor_parallel)
            if not spec.exclusive_cores:
                own["OMP_WAIT_POLICY"] = "passive"  # barriers that spin collapse where cores are shared
        return scrubbed(spec, "vllm") | own | checked_variables(self, spec.environment)

    def facts(self, told: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Facts of the worker, from its metrics, version and list of models. Raises ValueError."""
        samples = read(told["/metrics"], _NAMES)
        cache = samples.labels(_CACHE)
        model = json.loads(told["/v1/models"])["data"][0]
        kv_bytes = cache.get("kv_cache_memory_bytes", "None")
        return {
            "model": model["id"],
            "max_model_len": int(model["max_model_len"]),
            "num_blocks": _whole(cache.get("num_gpu_blocks")),
            "block_size": _whole(cache.get("block_size")),
            "max_num_seqs": int(parameters.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS)),
            "max_num_batched_tokens": parameters.get("max_num_batched_tokens"),
            "kv_bytes": int(kv_bytes) if kv_bytes.isdigit() else None,
            "kv_tokens": _whole(cache.get("kv_cache_size_tokens")),
            "prefix_cache": cache.get("enable_prefix_caching") == "True",
            "engine_version": json.loads(told["/version"])["version"],
        }

    def stats(self, told: Mapping[str, str]) -> dict[str, Any]:
        """What it does now, in the keys of our own engine's /stats. Raises ValueError where that is not on its page."""
        samples = read(told["/metrics"], _NAMES)
        missing = [name for name in (_RUNNING, _COUNTERS["steps"]) if name not in samples]
        if missing:
            raise ValueError(f"Its metrics lack {', '.join(missing)}")
        cache = samples.labels(_CACHE)
        usage, blocks = samples.mean(_USAGE), _whole(cache.get("num_gpu_blocks"))
        return {
            **{key: int(samples.total(name)) for key, name in _COUNTERS.items()},
            "running": int(samples.total(_RUNNING)),
            "waiting": int(samples.total(_WAITING)),
            "kv_usage": round(usage, 6),
            "num_blocks": blocks,
            "free_blocks": round(blocks * (1 - usage)),
            "block_size": _whole(cache.get("block_size")),
            "requests_finished": {why: int(n) for why, n in samples.by(_FINISHED, "finished_reason").items()},
            "requests_refused": int(samples.total(_REFUSED)),
            "asleep": _asleep(samples),
        }

    def _values(self, spec: WorkerSpec) -> dict[str, Any]:
        """Parameters with what the plan decides where the deployment does not."""
        if spec.quantisation not in QUANTISATIONS:
            raise AdapterError(f"quantisation {spec.quantisation} is not one that vLLM is asked for here.")
        values = {"max_num_seqs": DEFAULT_MAX_NUM_SEQS} | checked(self, spec.parameters)
        device = "gpu" if spec.gpus else "cpu"
        for name in values:
            if device not in self.parameters[name].devices:
                raise AdapterError(f"{name} means nothing on a {device.upper()}.")
        batched = values.get("max_num_batched_tokens")
        if batched is not None and batched < values["max_num_seqs"]:
            raise AdapterError("max_num_batched_tokens must be at least max_num_seqs, or decodes would starve.")
        if spec.gpus:
            values.setdefault("gpu_memory_utilization", self.parameters["gpu_memory_utilization"].default)
        else:
            values.setdefault("kv_cache_memory_bytes", spec.kv_bytes or DEFAULT_CPU_KV_BYTES)
            values.setdefault("block_size", "32")
        return values


def _option(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    if name == "tool_call_parser":
        # Without the level it lets arguments through that their schema forbids, also where the tool is named.
        return ["--enable-auto-tool-choice", "--tool-strict-level", "parameter", option, value]
    if value is True:
        return [option]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    return [option, f"{value:g}" if isinstance(value, float) else str(value)]


def _ranks(cores: tuple[int, ...], ranks: int) -> str:
    """Ids of cores for each rank of a tensor-parallel group, in vLLM's form: "0,1|2,3"."""
    share = len(cores) // ranks
    if share == 0:
        raise AdapterError(f"tensor_parallel: {ranks} ranks need at least {ranks} cores, and there are {len(cores)}.")
    return "|".join(",".join(map(str, cores[n * share : (n + 1) * share])) for n in range(ranks))


def _whole(text: str | None) -> int:
    """A label as a whole number; 0 where the engine says None."""
    return int(text) if text is not None and text.isdigit() else 0


def _asleep(samples: Samples) -> bool:
    states = samples.by(_SLEEP, "sleep_state")
    return bool(states) and not states.get("awake", 0.0)


VLLM = VllmAdapter()
