"""Faults between gateway and engine: tried again before the first byte, told after it, never text twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.conftest import chat, connected, events, text_of
from tests.serving.fakes import PROMPT_TOKENS, WORDS, EngineCall, Stack, running, well

CHAT = "/v1/chat/completions"
Script = Callable[[EngineCall], Awaitable[None]]


async def dies_at_once(call: EngineCall) -> None:
    call.die()


async def dies_after_the_head(call: EngineCall) -> None:
    await call.head()
    await call.event(call.chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}))
    call.die()


async def sends_nonsense(call: EngineCall) -> None:
    await call.head()
    await call.event(b"{not json")
    await call.end()


async def reports_an_error(call: EngineCall) -> None:
    await call.head()
    await call.event({"error": {"message": "CUDA went away", "code": 500}})
    await call.end()


async def ends_without_a_finish(call: EngineCall) -> None:
    await call.head()
    await call.event(b"[DONE]")
    await call.end()


async def is_no_stream(call: EngineCall) -> None:
    await call.head(200, "application/json")
    await call.raw(b"{}")
    await call.end()


async def gives_up(call: EngineCall) -> None:
    await call.head()
    await call.event(call.chunk(call.choice(None, finish="abort")))
    await call.event(b"[DONE]")
    await call.end()


async def fails(call: EngineCall) -> None:
    await call.refuse(500)


EARLY = [
    dies_at_once,
    dies_after_the_head,
    sends_nonsense,
    reports_an_error,
    ends_without_a_finish,
    is_no_stream,
    gives_up,
    fails,
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", EARLY)
async def test_a_fault_before_the_first_byte_is_tried_elsewhere(root: Path, fault: Script, stream: bool) -> None:
    async with running(root, engines=2) as stack, connected(stack) as client:
        for number, fake in enumerate(stack.engines):
            fake.script = fault if number == 0 else well
        for _ in range(2):  # whichever turn it is, one of them meets the broken engine first
            response = await client.post(CHAT, json=chat(stream=stream))
            assert response.status_code == 200
            text = text_of(events(response.text)) if stream else response.json()["choices"][0]["message"]["content"]
            assert text == "".join(WORDS)
        entries = await stack.settled()
        assert sorted(e.record.attempts for e in entries) == [1, 2]
        for entry in entries:
            assert entry.record.outcome == "ok"
            assert entry.record.replica_id == "replica-2"
            assert entry.usage is not None and entry.usage.completion_tokens == len(WORDS)
            if entry.record.attempts == 2:
                assert entry.detail.attempts[0]["replica_id"] == "replica-1"
                assert entry.detail.attempts[0]["error"]
        ids = [call.body["request_id"] for fake in stack.engines for call in fake.calls]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_replica_is_tried_again_where_there_is_no_other(
    stack: Stack, client: httpx.AsyncClient, stream: bool
) -> None:
    async def first_time_bad(call: EngineCall) -> None:
        await (dies_at_once if len(stack.engine.calls) == 1 else well)(call)

    stack.engine.script = first_time_bad
    response = await client.post(CHAT, json=chat(stream=stream))
    assert response.status_code == 200
    assert (await stack.the_settled()).record.attempts == 2
    assert (
        'fanlight_retries_total{reason="engine_unreachable",replica="replica-1"} 1.0'
        in (await client.get("/metrics")).text
    )


async def test_an_engine_that_is_away_is_502(stack: Stack, client: httpx.AsyncClient) -> None:
    await stack.engine.stop()
    response = await client.post(CHAT, json=chat())
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "engine_unreachable"
    assert str(stack.engine.path) not in response.text
    entry = await stack.the_settled()
    assert entry.usage is not None
    assert (entry.record.outcome, entry.usage.prompt_tokens, entry.usage.completion_tokens) == (
        "error",
        0,
        0,
    )


async def dies_in_the_middle(call: EngineCall) -> None:
    await call.head()
    for word in WORDS[:3]:
        await call.token(word)
    # a reader that has not read yet must find the words before the reset
    await asyncio.sleep(0.05)
    call.die()


async def test_a_fault_in_the_middle_of_a_stream_is_an_error_event_and_the_end(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    stack.engine.script = dies_in_the_middle
    response = await client.post(CHAT, json=chat(stream=True))
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert text_of(chunks) == "".join(WORDS[:3])
    assert last["error"]["code"] == "engine_unreachable"
    assert "[DONE]" not in response.text
    assert len(stack.engine.calls) == 1
    entry = await stack.the_settled()
    assert entry.usage is not None
    assert (entry.record.outcome, entry.record.status) == ("error", 200)
    assert (entry.usage.prompt_tokens, entry.usage.completion_tokens) == (PROMPT_TOKENS, 3)


async def test_without_streaming_no_byte_was_sent_and_it_is_tried_again(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    async def script(call: EngineCall) -> None:
        await (dies_in_the_middle if len(stack.engine.calls) == 1 else well)(call)

    stack.engine.script = script
    response = await client.post(CHAT, json=chat())
    assert response.json()["choices"][0]["message"]["content"] == "".join(WORDS)
    entry = await stack.the_settled()
    assert entry.usage is not None and entry.usage.completion_tokens == len(WORDS)


async def test_a_failed_answer_that_nobody_saw_is_not_billed(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = dies_in_the_middle
    assert (await client.post(CHAT, json=chat())).status_code == 502
    entry = await stack.the_settled()
    assert entry.usage is not None and entry.usage.completion_tokens == 0
    assert entry.detail.engine["completion_tokens"] == 3  # a failure cost, still to be seen


async def test_a_missing_done_after_the_finish_is_no_fault(stack: Stack, client: httpx.AsyncClient) -> None:
    async def script(call: EngineCall) -> None:
        await call.head()
        await call.token("all")
        await call.event(call.chunk(call.choice(None, finish="stop")))
        await call.end()

    stack.engine.script = script
    body = (await client.post(CHAT, json=chat(stream=True))).text
    assert body.endswith("data: [DONE]\n\n")
    assert (await stack.the_settled()).record.outcome == "ok"


@pytest.mark.parametrize("stream", [False, True])
async def test_no_first_token_in_time_is_a_timeout(root: Path, stream: bool) -> None:
    async def hang(call: EngineCall) -> None:
        await call.until_closed()

    limits: dict[str, Any] = {"first_token_deadline_s": 0.1}
    async with running(root, route_changes=limits) as stack, connected(stack) as client:
        stack.engine.script = hang
        response = await client.post(CHAT, json=chat(stream=stream))
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert response.headers["x-should-retry"] == "false"
        await (await stack.engine.call()).until_closed()
        assert (await stack.the_settled()).record.outcome == "timeout"


async def test_a_stall_in_the_middle_ends_a_stream_with_an_error(root: Path) -> None:
    async def stall(call: EngineCall) -> None:
        await call.head()
        await call.token("some")
        await call.until_closed()

    async with (
        running(root, route_changes={"inter_token_deadline_s": 0.15}) as stack,
        connected(stack) as client,
    ):
        stack.engine.script = stall
        *_, last = events((await client.post(CHAT, json=chat(stream=True))).text)
        assert last["error"]["code"] == "deadline_exceeded"
        entry = await stack.the_settled()
        assert entry.usage is not None
        assert (entry.record.outcome, entry.usage.completion_tokens) == ("timeout", 1)


async def test_the_deadline_without_streaming_says_to_stream_and_bills(root: Path) -> None:
    async def slow(call: EngineCall) -> None:
        await call.head()
        while not call.closed.is_set():
            await call.token("word ")
            await asyncio.sleep(0.02)

    async with (
        running(root, route_changes={"deadline_s": 0.2}) as stack,
        connected(stack) as client,
    ):
        stack.engine.script = slow
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 504
        assert "stream: true" in response.json()["error"]["message"]
        entry = await stack.the_settled()
        assert entry.usage is not None
        assert entry.record.outcome == "timeout"
        assert 0 < entry.usage.completion_tokens <= (await stack.engine.call()).sent_tokens
        assert entry.usage.prompt_tokens == PROMPT_TOKENS


async def test_load_spreads_over_ready_replicas(root: Path) -> None:
    async with running(root, engines=3) as stack, connected(stack) as client:

        async def slow(call: EngineCall) -> None:
            await call.say(gap_s=0.01)

        for fake in stack.engines:
            fake.script = slow
        await asyncio.gather(*(client.post(CHAT, json=chat(stream=True)) for _ in range(9)))
        assert [len(fake.calls) for fake in stack.engines] == [3, 3, 3]


async def test_every_settled_request_frees_its_place(stack: Stack, client: httpx.AsyncClient) -> None:
    for script in (*EARLY, well):
        stack.engine.script = script
        await client.post(CHAT, json=chat())
    await stack.idle()
    metrics = (await client.get("/metrics")).text
    assert 'fanlight_upstream_in_flight{replica="replica-1"} 0.0' in metrics
    assert "fanlight_in_flight 0.0" in metrics
