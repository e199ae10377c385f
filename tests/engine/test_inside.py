"""Seeing inside a running engine, deadlines, and a queue bounded by tokens."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engine.blockmap import MAX_RUNS, MAX_SEQUENCES, block_map
from tests.engine.served import NAME, Served, serve
from tests.engine.test_scheduler import Rig

STORY: dict[str, Any] = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True}


@contextmanager
def streaming(url: str, tokens: int = 1, **fields: Any) -> Iterator[Iterator[str]]:
    """A stream that has sent so many tokens."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = STORY | {"stream": True, "stream_options": usage} | fields
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        while (
            json.loads(next(lines).removeprefix("data: ") or "{}").get("usage", {}).get("completion_tokens", 0) < tokens
        ):
            pass
        yield lines


def test_blocks_and_steps_of_a_running_request_can_be_seen(served: Served) -> None:
    served.wait_idle()
    with streaming(served.url, tokens=20):
        seen = httpx.get(f"{served.url}/debug/blocks").json()
        (sequence,) = seen["sequences"]
        assert sequence["status"] == "running"
        assert sequence["in_kv"] >= 4
        assert sum(length for _first, length in sequence["table"]) == sequence["blocks"]
        assert seen["held"] <= sequence["blocks"] <= seen["held"] + 1, "more than the step between the two readings"
        assert all(seen["blocks"][first] != "." for first, _length in sequence["table"])
        steps = httpx.get(f"{served.url}/debug/steps?last=3").json()
        assert len(steps["steps"]) == 3
        newest = steps["steps"][-1]
        assert (newest["sequences"], newest["decode_tokens"], newest["prefill_tokens"]) == (1, 1, 0)
        assert newest["began_ns"] <= steps["anchor"]["mono_ns"]
        assert sum(newest["parts"].values()) <= newest["ms"] + 0.01
    served.wait_idle()
    seen = httpx.get(f"{served.url}/debug/blocks").json()
    assert (seen["held"], seen["sequences"]) == (0, [])
    assert seen["free"] + seen["cached"] == len(seen["blocks"]) == seen["num_blocks"]
    assert seen["cached"] > 0


def test_what_is_asked_of_the_steps_is_checked_and_bounded(served: Served) -> None:
    for bad in ("x", "-1", "1e3", "9" * 12):
        assert httpx.get(f"{served.url}/debug/steps", params={"last": bad}).status_code == 400
    assert httpx.get(f"{served.url}/debug/steps?last=0").json()["steps"] == []
    assert len(httpx.get(f"{served.url}/debug/steps?last=999999999").json()["steps"]) <= 1024
    assert httpx.post(f"{served.url}/debug/steps").status_code == 405


def test_parts_and_host_are_in_stats_and_metrics(served: Served) -> None:
    httpx.post(f"{served.url}/v1/completions", json=STORY | {"max_tokens": 4}, timeout=60)
    stats = served.wait_idle()
    assert {"schedule", "deliver", "forward", "mask", "sample", "commit"} == stats["step_ms_by_part"].keys()
    assert (stats["host_blocks"], stats["host_blocks_used"], stats["swapped_in_blocks"]) == (0, 0, 0)
    text = httpx.get(f"{served.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    parts = {sample.labels["part"]: sample.value for sample in families["fanlight:step_seconds"].samples}
    assert parts.keys() >= stats["step_ms_by_part"].keys()
    assert all(seconds > 0 for seconds in parts.values())
    kinds = {sample.labels["kind"] for sample in families["fanlight:preemptions"].samples}
    assert kinds == {"swap", "recompute"}


def test_a_deadline_is_a_504_or_the_end_of_a_stream(served: Served) -> None:
    late = httpx.post(f"{served.url}/v1/completions", json=STORY | {"deadline_ms": 1}, timeout=60)
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline_exceeded"
    assert late.json()["error"]["param"] == "deadline_ms"
    # Long enough for a first token, far too short for 4,000 of them.
    with streaming(served.url, max_tokens=4000, deadline_ms=5000) as lines:
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    refused = httpx.post(f"{served.url}/v1/completions", json=STORY | {"deadline_ms": 0}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "deadline_ms")
    served.wait_idle()


def test_the_queue_is_bounded_by_tokens_too(bundled_model: Path, tmp_path: Path) -> None:
    """One runs, one waits though it is longer than the bound, and the next is refused."""
    options = ("--max-num-seqs", "1", "--max-queued-tokens", "50", "--num-blocks", "256")
    with serve(bundled_model, tmp_path, *options) as engine, streaming(engine.url, max_tokens=3000):
        body = STORY | {"prompt": [5] * 60, "max_tokens": 5, "stream": True}
        with httpx.Client(base_url=engine.url, timeout=120) as api:
            request = api.build_request("POST", "/v1/completions", json=body)
            with _sent(request):
                stats = engine.wait_for(lambda s: s["waiting"] == 1)
                assert stats["waiting_tokens"] == 60
                refused = api.post("/v1/completions", json=STORY)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "Requests with 60 tokens wait already; the limit is 50."


@contextmanager
def _sent(request: httpx.Request) -> Iterator[None]:
    """Send a request without waiting for its answer; close the connection at the end."""
    with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
        body = request.read()
        head = f"POST {request.url.path} HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield


def test_a_pool_that_is_lent_from_serves_on_and_gives_its_memory_back(bundled_model: Path, tmp_path: Path) -> None:
    """What runs keeps its blocks, the next requests share what is left, and later all is there again."""
    bodies = [STORY | {"prompt": [word] * 1500, "max_tokens": 20, "temperature": 0} for word in (7, 9)]
    with (
        serve(bundled_model, tmp_path, "--num-blocks", "512", "--max-model-len", "2048") as engine,
        httpx.Client(base_url=engine.url, timeout=120) as api,
    ):
        texts = [api.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
        full = engine.wait_idle()["rss_bytes"]
        with streaming(engine.url, max_tokens=300) as lines:
            told = api.put("/pool", json={"usable_blocks": 1}).json()
            assert told == {"num_blocks": 512, "usable_blocks": 128}, "one window is always left"
            again = [api.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
            assert any('"finish_reason":"length"' in line for line in lines)
        stats = engine.wait_for(lambda s: s["free_blocks"] == s["usable_blocks"] == 128)
        beyond = 2 * 1520 // 16 - 128  # blocks whose memory was taken before, and is not needed now
        assert full - stats["rss_bytes"] > 0.7 * beyond * engine.facts["kv_bytes"] / 512
        assert again == texts
        seen = api.get("/debug/blocks").json()
        assert (seen["withheld"], seen["blocks"].count("-")) == (384, 384)
        assert api.put("/pool", json={"usable_blocks": 1 << 40}).json()["usable_blocks"] == 512
        assert engine.wait_idle()["usable_blocks"] == 512


def test_what_a_pool_is_told_is_checked(served: Served) -> None:
    for bad in (0, -1, True, 1.5, "x", None, 1 << 70):
        refused = httpx.put(f"{served.url}/pool", json={"usable_blocks": bad})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "usable_blocks")
    assert httpx.put(f"{served.url}/pool", json={"blocks": 5}).status_code == 400
    assert httpx.put(f"{served.url}/pool", content=b"[").status_code == 400
    assert httpx.post(f"{served.url}/pool", json={"usable_blocks": 5}).status_code == 405
    stats = served.wait_idle()
    assert stats["usable_blocks"] == stats["num_blocks"]
    assert "fanlight:usable_blocks" in httpx.get(f"{served.url}/metrics").text


def test_the_map_is_bounded() -> None:
    rig = Rig(num_blocks=700, block_size=1, max_num_batched_tokens=700)
    rig.add(600, max_tokens=50)
    rig.step()
    sequence = rig.scheduler.running[0]
    sequence.block_table = list(range(0, 1200, 2))
    assert block_map(rig.scheduler)["sequences"][0]["blocks"] == 600
    assert len(block_map(rig.scheduler)["sequences"][0]["table"]) == MAX_RUNS
    for _ in range(300):
        rig.add(1)
    seen = block_map(rig.scheduler)
    assert (len(seen["sequences"]), seen["sequences_left_out"]) == (MAX_SEQUENCES, 301 - MAX_SEQUENCES)


def test_a_shared_block_shows_how_often_it_is_held() -> None:
    rig = Rig(num_blocks=32)
    shared = list(range(9))
    rig.add_prompt(shared, max_tokens=1)
    rig.step()
    for _ in range(3):
        rig.add_prompt(shared, max_tokens=8)
        rig.step()
    seen = block_map(rig.scheduler)
    assert seen["blocks"].count("3") == 2
    assert seen["free"] + seen["cached"] + seen["held"] == 32
