"""What the adapter says of the real vLLM is so: facts, numbers, progress, and what a gateway gets out of it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from console.catalog import facts, files
from console.fleet import heartbeat, probe, progress
from console.fleet.heartbeat import Heartbeats
from engine.adapters import adapter
from engine.footprint import Shape, kv_bytes
from tests.serving.conftest import events
from tests.serving.fakes import KEY, MODEL, OTHER_KEY, Stack
from tests.vllm.gateway import ASKED, CHAT, client_of, in_front_of
from tests.vllm.server import KV_BYTES, PARAMETERS, Server

LONG = [{"role": "user", "content": "Say something about each of these words: " + "tree river " * 60}]


class TestAdapter:
    def test_it_was_started_by_our_command_line_alone(self, vllm: Server) -> None:
        argv, env = adapter("vllm").command(vllm.spec), adapter("vllm").environment(vllm.spec)
        assert vllm.process.args == argv
        assert "--uds" in argv and not {"--port", "--host", "--trust-remote-code"} & set(argv)
        assert not [name for name in env if "FANLIGHT" in name or "SECRET" in name]
        running = psutil.Process(vllm.process.pid).environ()
        assert running.keys() >= env.keys() and "FANLIGHT_DATA_DIR" in os.environ and "FANLIGHT_DATA_DIR" not in running

    def test_its_facts(self, vllm: Server) -> None:
        told = vllm.facts
        assert told["model"] == "smol" and told["engine_version"] == "0.32.0" and told["block_size"] == 32
        assert (told["max_model_len"], told["max_num_seqs"]) == (2048, PARAMETERS["max_num_seqs"])
        assert told["num_blocks"] * told["block_size"] == told["kv_tokens"] and told["kv_bytes"] == KV_BYTES

    def test_its_numbers_count_what_it_does(self, vllm: Server) -> None:
        before = vllm.rest()
        answer = vllm.chat(messages=ASKED, max_tokens=7, ignore_eos=True, temperature=0)
        after = vllm.rest()
        grown = {name: after[name] - before[name] for name in before if name in after and name.endswith("tokens")}
        assert grown["generation_tokens"] == answer["usage"]["completion_tokens"] == 7
        assert grown["prompt_tokens"] == answer["usage"]["prompt_tokens"] == grown["prefix_query_tokens"]
        assert after["steps"] - before["steps"] >= 7
        assert grown["step_tokens"] == 7 + grown["prompt_tokens"] - grown["prefix_hit_tokens"]
        assert after["requests_finished"]["length"] == before["requests_finished"]["length"] + 1

    def test_every_parameter_is_one_of_its_options(self, vllm: Server) -> None:
        """As its own parser knows them: an option that is renamed by a later version is found here."""
        source = next(
            (Path(vllm.spec.python or "").parents[1]).glob("lib/python3*/site-packages/vllm/engine/arg_utils.py")
        )
        cli = source.parents[1] / "entrypoints" / "launchers" / "cli_args.py"
        text = source.read_text() + cli.read_text()
        for name in adapter("vllm").parameters:
            assert f"--{name.replace('_', '-')}" in text or re.search(rf"^    {name}: ", text, re.MULTILINE), name

    def test_what_the_memory_plan_says_of_it_is_within_two_percent(self, vllm: Server, converted_model: Path) -> None:
        read = facts.read(files.inspect(converted_model, [converted_model.parent]))
        shape = Shape(
            layers=read.layers, hidden=read.hidden_size, heads=read.heads, kv_heads=read.kv_heads,
            head_dim=read.head_dim, intermediate=read.intermediate_size, vocab=read.vocab_size,
            parameters=read.parameters, weights_bytes=read.weights_bytes, context=read.context_length,
        )  # fmt: skip
        planned = kv_bytes(shape, 1, vllm.facts["kv_tokens"], vllm.facts["block_size"], 2)
        assert planned == pytest.approx(KV_BYTES, rel=0.02)
        told = re.search(r"Checkpoint size: ([\d.]+) GiB", vllm.log.read_text())
        assert told is not None
        assert read.weights_bytes == pytest.approx(float(told[1]) * 2**30, rel=0.02)


class TestProgress:
    @pytest.fixture
    def beats(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeats]:
        """At a faster pace than in service, or these would take a minute."""
        monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
        monkeypatch.setattr(heartbeat, "IDLE_CHECK_S", 0.5)
        monkeypatch.setattr(progress, "HUNG_FLOOR_S", 1.5)
        monkeypatch.setattr(progress, "HUNG_FACTOR", 0.01)
        monkeypatch.setattr(heartbeat.live, "publish", lambda *_args: None)
        monkeypatch.setattr(heartbeat._Owed, "of", lambda *_args: 0)
        beats, stop = Heartbeats(), threading.Event()
        thread = threading.Thread(target=beats.run, args=(stop,), daemon=True)
        thread.start()
        yield beats
        stop.set()
        thread.join(5)

    def until(self, beats: Heartbeats, healthy: bool) -> str:
        deadline = time.monotonic() + 60
        while True:
            heard = beats.heard("r")
            if heard is not None and heard.healthy is healthy:
                return heard.reason
            assert time.monotonic() < deadline, heard
            time.sleep(0.02)

    def test_a_core_that_is_stuck_while_it_runs_is_not_healthy_whatever_its_health_says(
        self, vllm: Server, beats: Heartbeats
    ) -> None:
        vllm.rest()
        said: list[Any] = []
        asking = threading.Thread(
            target=lambda: said.append(vllm.chat(messages=ASKED, max_tokens=60, ignore_eos=True)), daemon=True
        )
        asking.start()
        deadline = time.monotonic() + 30
        while not vllm.stats()["running"]:
            assert time.monotonic() < deadline
        beats.watch("r", vllm.where)
        self.until(beats, healthy=True)
        with vllm.frozen():
            reason = self.until(beats, healthy=False)
            assert reason.startswith("1 running and no step for")
            assert vllm.get("/health")[0] == 200
        self.until(beats, healthy=True)
        asking.join(60)
        assert said and said[0]["usage"]["completion_tokens"] == 60
        vllm.rest()

    def test_a_core_that_got_stuck_while_idle_is_found_by_asking_for_a_token(
        self, vllm: Server, beats: Heartbeats
    ) -> None:
        vllm.rest()
        with vllm.frozen():
            beats.watch("r", vllm.where)
            reason = self.until(beats, healthy=False)
            assert reason.startswith("idle, but: The test prompt got no answer")
            assert vllm.stats()["running"] == 0 and vllm.get("/health")[0] == 200
        self.until(beats, healthy=True)
        vllm.rest(60)

    def test_it_is_verified_by_a_real_generation(self, vllm: Server) -> None:
        assert 0 < probe.verify(str(vllm.uds), "smol") < 60
        with pytest.raises(probe.VerificationError, match="404"):
            probe.verify(str(vllm.uds), "another")


class TestThroughTheGateway:
    async def post(self, stack: Stack, key: str = KEY, **body: Any) -> tuple[int, str]:
        async with client_of(stack, key) as client:
            answer = await client.post(CHAT, json={"model": MODEL, "temperature": 0, **body})
            return answer.status_code, answer.text

    async def test_cached_tokens_and_queue_time_arrive_in_the_record(self, vllm: Server, root: Path) -> None:
        async with in_front_of(vllm, root, 4) as stack:
            for key in (KEY, KEY, OTHER_KEY):
                assert (await self.post(stack, key, messages=LONG, max_tokens=3))[0] == 200
            first, second, other = await stack.settled()
        assert first.usage is not None and second.usage is not None and other.usage is not None
        assert first.usage.prompt_tokens > 128
        assert first.usage.cached_tokens == other.usage.cached_tokens == 0  # never another tenant's
        assert second.usage.cached_tokens == (first.usage.prompt_tokens - 1) // 32 * 32
        assert second.record.cached_tokens == second.usage.cached_tokens
        phases = {phase[0] for phase in second.detail.phases}
        assert {"engine_queue", "prefill", "decode"} <= phases

    async def test_a_named_tool_is_called_with_what_its_schema_allows(self, vllm: Server, root: Path) -> None:
        schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
        schema["additionalProperties"] = False
        tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
        body = {"messages": ASKED, "tools": [tool], "max_tokens": 60}
        body["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
        async with in_front_of(vllm, root, 4) as stack:
            _, text = await self.post(stack, **body)
            _, stream = await self.post(stack, stream=True, **body)
        (call,) = json.loads(text)["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in {"Paris", "Rome"}
        deltas = [c["delta"] for e in events(stream) if e != "[DONE]" for c in e["choices"]]
        parts = [each["function"] for delta in deltas for each in delta.get("tool_calls") or ()]
        assert "".join(part.get("arguments") or "" for part in parts) == call["function"]["arguments"]

    async def test_structured_output(self, vllm: Server, root: Path) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        async with in_front_of(vllm, root, 4) as stack:
            status, text = await self.post(stack, messages=ASKED, response_format=form, max_tokens=60)
            (entry,) = await stack.settled()
        choice = json.loads(text)["choices"][0]
        assert status == 200 and entry.record.outcome == "ok"
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"])["n"], int)
        else:  # a number may go on for as long as it is let
            assert re.fullmatch(r'\{\s*"n"\s*:\s*-?\d+', choice["message"]["content"])

    async def test_the_engine_gets_our_request_id(self, vllm: Server, root: Path) -> None:
        async with in_front_of(vllm, root, 4) as stack, client_of(stack, KEY) as client:
            answer = await client.post(CHAT, json={"model": MODEL, "messages": ASKED, "max_tokens": 1})
            entry = await stack.the_settled()
        assert answer.headers["x-request-id"] == entry.record.id
