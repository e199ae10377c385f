"""Adapters: command lines of checked parameters, scrubbed environments, what workers tell in one set of keys."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.adapters import ADAPTERS, adapter
from engine.adapters.base import Adapter, AdapterError, Parameter, WorkerSpec, checked_variables
from engine.adapters.prometheus import read
from engine.adapters.recommend import USES, recommend

SPEC = WorkerSpec(
    model_path=Path("/models/small"),
    model_revision="abc",
    served_name="small",
    uds=Path("/run/w.sock"),
    ready_file=Path("/run/ready.json"),
    threads=2,
    drain_s=30.0,
    parameters={},
    fault_delays={},
    cache=Path("/data"),
    python=Path("/runtimes/engine/bin/python"),
)
STATS = {
    "running", "waiting", "kv_usage", "num_blocks", "free_blocks", "block_size", "steps", "prefix_query_tokens",
    "prefix_hit_tokens", "prompt_tokens", "generation_tokens", "preemptions",
}  # fmt: skip
VLLM_METRICS = (Path(__file__).parent / "vllm-0.32.0-metrics.txt").read_text("utf-8")


def spec(**changes: Any) -> WorkerSpec:
    return dataclasses.replace(SPEC, **changes)


def every_adapter() -> list[Adapter]:
    return list(ADAPTERS.values())


def after(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_an_unknown_engine_is_refused_with_those_that_there_are() -> None:
    assert adapter("vllm").title == "vLLM"
    with pytest.raises(AdapterError, match="embedded, vllm"):
        adapter("llamafile")


@pytest.mark.parametrize("each", every_adapter(), ids=lambda each: each.engine)
class TestEvery:
    def test_what_is_not_on_its_list_reaches_no_command_line(self, each: Adapter) -> None:
        for name in ("trust_remote_code", "trust-remote-code", "load_format", "chat_template", "api_key"):
            with pytest.raises(AdapterError, match=name):
                each.command(spec(parameters={name: True}))

    def test_never_trusts_code_that_comes_with_a_model(self, each: Adapter) -> None:
        argv = each.command(SPEC)
        assert "--trust-remote-code" not in argv and "--trust_remote_code" not in argv

    def test_its_environment_is_its_own(self, each: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FANLIGHT_SECRET_KEY", "hidden")
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
        env = each.environment(SPEC)
        assert "hidden" not in env.values() and not {"HTTPS_PROXY", "PYTHONPATH", "LD_PRELOAD"} & set(env)
        assert env["HF_HUB_OFFLINE"] == "1"

    def test_only_listed_variables_may_be_set(self, each: Adapter) -> None:
        for name in ("LD_PRELOAD", "PYTHONPATH", "PATH", "HF_TOKEN"):
            with pytest.raises(AdapterError, match=name):
                each.environment(spec(environment={name: "x"}))
        for name in each.variables:
            assert each.environment(spec(environment={name: "7"}))[name] == "7"
            with pytest.raises(AdapterError, match="printable"):
                checked_variables(each, {name: "a\nb"})

    def test_every_parameter_is_explained_and_its_default_is_allowed(self, each: Adapter) -> None:
        for name, parameter in each.parameters.items():
            assert parameter.help.endswith("."), name
            if parameter.default is not None:
                assert parameter.parse(name, parameter.default) == parameter.default

    def test_every_quantisation_it_says_it_has_makes_a_command_line(self, each: Adapter) -> None:
        for name in each.capabilities.quantisations:
            assert each.command(spec(quantisation=name))
        with pytest.raises(AdapterError, match="2bit"):
            each.command(spec(quantisation="2bit"))

    def test_what_was_not_run_says_so(self, each: Adapter) -> None:
        assert each.capabilities.tried or (each.capabilities.note and each.capabilities.source)


class TestParameter:
    @pytest.mark.parametrize("value", [0, 11, "x", "8", None, True, 1.5, 2.0, math.inf, math.nan, []])
    def test_whole_numbers_in_bounds_only(self, value: object) -> None:
        with pytest.raises(AdapterError, match="n must be a whole number from 1 to 10"):
            Parameter("int", "N.", low=1, high=10).parse("n", value)

    @pytest.mark.parametrize("value", [math.nan, math.inf, "0.5", 1.01, -1, True, None])
    def test_numbers_in_bounds_only(self, value: object) -> None:
        with pytest.raises(AdapterError, match="f must be a number from 0 to 1"):
            Parameter("float", "F.", low=0, high=1).parse("f", value)

    def test_text_of_a_form_is_read(self) -> None:
        assert Parameter("int", "N.").read("n", "12") == 12
        assert Parameter("float", "N.").read("n", "0.5") == 0.5
        assert Parameter("bool", "N.").read("n", "on") is True and Parameter("bool", "N.").read("n", "False") is False
        assert Parameter("choice", "N.", choices=("a", "b")).read("n", "b") == "b"

    @pytest.mark.parametrize(
        ("parameter", "text", "wanted"),
        [
            (Parameter("bool", "N."), "maybe", "true or false"),
            (Parameter("choice", "N.", choices=("a", "b")), "c", "one of a, b"),
            (Parameter("int", "N.", low=1), "1.5", "a whole number of at least 1"),
            (Parameter("int", "N.", low=1), "0", "a whole number of at least 1"),
            (Parameter("float", "N."), "nan", "a number"),
            (Parameter("int", "N."), "9" * 5000, "a whole number"),
        ],
    )
    def test_other_text_is_refused_with_what_it_may_be(self, parameter: Parameter, text: str, wanted: str) -> None:
        with pytest.raises(AdapterError, match=f"n must be {wanted}"):
            parameter.read("n", text)


class TestEmbedded:
    def test_its_command_line(self) -> None:
        given = {"max_num_seqs": 8, "prefix_cache": False, "dtype": "bf16"}
        argv = adapter("embedded").command(
            spec(python=None, parameters=given, fault_delays={"decode": 0.25, "other": 1})
        )
        assert argv[1:4] == ["-m", "engine", "serve"] and after(argv, "--uds") == "/run/w.sock"
        assert after(argv, "--max-num-seqs") == "8" and after(argv, "--dtype") == "bf16"
        assert "--no-prefix-cache" in argv and after(argv, "--fault-delay") == "decode=250"
        assert "other" not in " ".join(argv)

    def test_the_quantisation_of_the_form_is_its_dtype(self) -> None:
        argv = adapter("embedded").command(spec(parameters={"dtype": "bf16"}, quantisation="int8"))
        assert after(argv, "--dtype") == "int8" and argv.count("--dtype") == 1

    def test_on_one_device_only(self) -> None:
        with pytest.raises(AdapterError, match="one device"):
            adapter("embedded").command(spec(tensor_parallel=2))

    def test_its_options_are_those_that_the_engine_has(self) -> None:
        from engine.__main__ import parser

        given = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 32, "block_size": 16, "max_queued": 9}
        given |= {"max_model_len": 128, "prefix_cache": False, "dtype": "int8"}
        assert set(given) == set(adapter("embedded").parameters)
        options = parser().parse_args(adapter("embedded").command(spec(parameters=given))[3:])
        assert {name: getattr(options, name) for name in given} == given

    def test_its_stats_come_as_they_are(self) -> None:
        assert adapter("embedded").stats({"/stats": '{"running": 1}'}) == {"running": 1}
        with pytest.raises(ValueError, match="no object"):
            adapter("embedded").stats({"/stats": "[]"})


class TestVllm:
    def test_its_command_line(self) -> None:
        given = {"max_num_seqs": 8, "enable_prefix_caching": False, "tool_call_parser": "hermes", "enforce_eager": True}
        argv = adapter("vllm").command(spec(parameters=given, kv_bytes=1 << 28))
        assert argv[:3] == ["/runtimes/engine/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
        assert after(argv, "--uds") == "/run/w.sock" and "--port" not in argv
        told = {"--enable-prompt-tokens-details", "--enable-per-request-metrics", "--enable-request-id-headers"}
        assert told <= set(argv) and after(argv, "--load-format") == "safetensors"
        assert "--no-enable-prefix-caching" in argv and "--enforce-eager" in argv
        assert after(argv, "--kv-cache-memory-bytes") == str(1 << 28)
        assert "--enable-auto-tool-choice" in argv and after(argv, "--tool-strict-level") == "parameter"

    def test_on_cards_it_takes_a_share_and_on_a_cpu_bytes(self) -> None:
        on_cards = spec(gpus=("GPU-1", "GPU-2"), tensor_parallel=2, parameters={"gpu_memory_utilization": 0.85})
        argv = adapter("vllm").command(on_cards)
        assert after(argv, "--gpu-memory-utilization") == "0.85" and "--kv-cache-memory-bytes" not in argv
        assert after(argv, "--tensor-parallel-size") == "2"
        assert adapter("vllm").environment(on_cards)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
        with pytest.raises(AdapterError, match="gpu_memory_utilization means nothing on a CPU"):
            adapter("vllm").command(spec(parameters={"gpu_memory_utilization": 0.9}))

    def test_cores_are_bound_and_shared_ones_wait_passively(self) -> None:
        env = adapter("vllm").environment(spec(cores=(2, 3, 6, 7), tensor_parallel=2))
        assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3|6,7" and "OMP_WAIT_POLICY" not in env
        shared = adapter("vllm").environment(spec(cores=(0, 1), exclusive_cores=False))
        assert shared["VLLM_CPU_OMP_THREADS_BIND"] == "0,1" and shared["OMP_WAIT_POLICY"] == "passive"
        with pytest.raises(AdapterError, match="at least 2 cores"):
            adapter("vllm").environment(spec(cores=(0,), tensor_parallel=2))

    def test_its_own_sockets_lie_beside_ours_and_not_where_everybody_may_write(self) -> None:
        assert adapter("vllm").environment(SPEC)["VLLM_RPC_BASE_PATH"] == "/run/w"
        deep = spec(uds=Path("/" + "d" * 71) / "w.sock")  # vLLM would not start: no socket has so long a path
        assert "VLLM_RPC_BASE_PATH" not in adapter("vllm").environment(deep)

    def test_what_it_compiles_is_kept(self) -> None:
        env = adapter("vllm").environment(SPEC)
        assert env["HOME"] == "/data/vllm" and env["TORCHINDUCTOR_CACHE_DIR"].startswith("/data/vllm/")

    def test_it_needs_a_runtime_and_room_for_every_decode(self) -> None:
        with pytest.raises(AdapterError, match="runtime"):
            adapter("vllm").command(spec(python=None))
        with pytest.raises(AdapterError, match="decodes would starve"):
            adapter("vllm").command(spec(parameters={"max_num_seqs": 64, "max_num_batched_tokens": 32}))

    def test_its_metrics_in_our_keys(self) -> None:
        stats = adapter("vllm").stats({"/metrics": VLLM_METRICS})
        assert set(stats) >= STATS
        assert (stats["steps"], stats["step_tokens"], stats["running"]) == (4, 35, 0)
        assert (stats["prompt_tokens"], stats["generation_tokens"], stats["prefix_query_tokens"]) == (31, 4, 31)
        assert (stats["num_blocks"], stats["free_blocks"], stats["block_size"]) == (364, 364, 32)
        assert stats["requests_finished"]["length"] == 1 and stats["asleep"] is False

    def test_a_page_without_its_metrics_is_no_answer(self) -> None:
        with pytest.raises(ValueError, match="num_requests_running"):
            adapter("vllm").stats({"/metrics": "python_info 1.0\n"})

    def test_its_facts(self) -> None:
        models = {"data": [{"id": "small", "max_model_len": 4096}]}
        told = {"/metrics": VLLM_METRICS, "/version": '{"version": "0.32.0"}', "/v1/models": json.dumps(models)}
        facts = adapter("vllm").facts(told, {"max_num_seqs": 8})
        assert facts["num_blocks"] * facts["block_size"] == facts["kv_tokens"] == 11648
        assert (facts["max_num_seqs"], facts["max_model_len"], facts["engine_version"]) == (8, 4096, "0.32.0")
        assert facts["kv_bytes"] == 1 << 28 and facts["prefix_cache"] is True


class TestNotYetRun:
    """What their documents say; only a run on a card can tell whether it is so."""

    def test_sglang(self) -> None:
        given = {"max_num_seqs": 8, "enable_prefix_caching": False, "gpu_memory_utilization": 0.8}
        argv = adapter("sglang").command(spec(parameters=given, port=7001, key="own", tensor_parallel=2))
        assert argv[1:3] == ["-m", "sglang.launch_server"] and after(argv, "--host") == "127.0.0.1"
        assert after(argv, "--max-running-requests") == "8" and after(argv, "--mem-fraction-static") == "0.8"
        assert "--disable-radix-cache" in argv and after(argv, "--tp-size") == "2" and after(argv, "--api-key") == "own"
        page = (
            'sglang:num_running_reqs{model_name="m"} 3\nsglang:num_queue_reqs{model_name="m"} 2\n'
            'sglang:token_usage{model_name="m"} 0.25\nsglang:max_total_num_tokens{model_name="m"} 1000\n'
            'sglang:prompt_tokens_total{model_name="m"} 100\nsglang:generation_tokens_total{model_name="m"} 50\n'
            'sglang:cached_tokens_total{model_name="m",cache_source="device"} 40\n'
        )
        stats = adapter("sglang").stats({"/metrics": page})
        assert set(stats) >= STATS and (stats["running"], stats["waiting"], stats["steps"]) == (3, 2, 150)
        assert (stats["num_blocks"], stats["free_blocks"], stats["prefix_hit_tokens"]) == (1000, 750, 40)
        with pytest.raises(ValueError, match="num_running_reqs"):
            adapter("sglang").stats({"/metrics": ""})

    def test_tensorrt_llm(self) -> None:
        argv = adapter("trtllm").command(spec(parameters={"max_num_seqs": 8, "max_model_len": 4096}, port=7001))
        assert argv[0] == "/runtimes/engine/bin/trtllm-serve" and after(argv, "--max_batch_size") == "8"
        assert after(argv, "--max_seq_len") == "4096" and after(argv, "--port") == "7001"
        kv = {"maxNumBlocks": 100, "freeNumBlocks": 75, "tokensPerBlock": 32, "reusedBlocks": 4, "missedBlocks": 6}
        page = json.dumps([{"iter": 1}, {"iter": 154, "numActiveRequests": 2, "kvCacheStats": kv}])
        stats = adapter("trtllm").stats({"/metrics": page})
        assert set(stats) >= STATS and (stats["steps"], stats["running"], stats["kv_usage"]) == (154, 2, 0.25)
        assert (stats["prefix_query_tokens"], stats["prefix_hit_tokens"]) == (320, 128)


class TestRecommendation:
    @pytest.mark.parametrize(
        ("use", "engine"),
        [("chat", "vllm"), ("rag", "vllm"), ("tools", "vllm"), ("agents", "sglang"), ("latency", "trtllm")],
    )
    def test_by_use(self, use: str, engine: str) -> None:
        found = recommend(use)
        assert found.engine == engine and found.reason.endswith(".")

    def test_what_does_not_fit_is_named_with_the_reason_why_not(self) -> None:
        assert recommend("agents", gpus=0).engine == recommend("chat", format="gguf").engine == "embedded"
        assert recommend("latency", uniform=False).engine == "vllm" and recommend("latency", uniform=False).instead
        assert recommend("agents", tried_only=True).engine == "vllm"
        assert recommend("learn").engine == "embedded" and not recommend("learn", gpus=0).instead
        assert set(USES) == {"chat", "rag", "tools", "agents", "latency", "learn"}


class TestPrometheus:
    def test_sums_means_and_groups(self) -> None:
        text = 'a{x="1",y="p\\"q"} 2.0\na{x="2",y="r"} 3\nb 0.5 1700000000\n# a comment\nskipped{x="} 1\n'
        samples = read(text, ("a", "b"))
        assert samples.total("a") == 5 and samples.mean("a") == 2.5 and samples.by("a", "x") == {"1": 2, "2": 3}
        assert samples.labels("a")["y"] == 'p\\"q' and samples.total("b") == 0.5
        assert samples.total("none", 7) == 7 and "skipped" not in samples

    def test_a_wanted_line_that_cannot_be_read_is_told(self) -> None:
        with pytest.raises(ValueError, match="cannot be read"):
            read("a{x=1\n", ("a",))


def test_vllm_sends_its_spans_where_it_is_told_and_nowhere_else() -> None:
    vllm, told = (
        adapter("vllm"),
        spec(python=Path("/env/bin/python"), traces=("http://127.0.0.1:4/v1/traces", "secret")),
    )
    assert after(vllm.command(told), "--otlp-traces-endpoint") == "http://127.0.0.1:4/v1/traces"
    assert vllm.environment(told)["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] == "authorization=Bearer%20secret"
    silent = spec(python=Path("/env/bin/python"))
    assert "--otlp-traces-endpoint" not in vllm.command(silent)
    assert not [name for name in vllm.environment(silent) if name.startswith("OTEL")]


def test_the_embedded_engine_sees_the_card_it_was_given_and_no_other() -> None:
    embedded = adapter("embedded")
    assert embedded.environment(spec(gpus=("GPU-1",)))["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert embedded.environment(spec(gpus=()))["CUDA_VISIBLE_DEVICES"] == ""
