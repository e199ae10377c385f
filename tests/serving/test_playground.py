"""The playground's way in: the same pipeline, checks and records, without HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from serving.port import Delta
from tests.serving.conftest import chat
from tests.serving.fakes import PROMPT_TOKENS, WORDS, EngineCall, Stack, breaks, endless, principal, running

PLAYER = principal(source="playground", key_id="playground")


async def everything(stack: Stack, **changes: object) -> list[Delta]:
    return [delta async for delta in stack.gateway.inference.chat(PLAYER, chat(**changes))]


async def test_a_chat_streams_deltas_and_is_recorded(stack: Stack) -> None:
    started, *deltas, done = await everything(stack, stop=["###"])
    assert started.kind == "started" and started.request_id
    assert "".join(delta.text for delta in deltas) == "".join(WORDS)
    assert (done.kind, done.finish_reason, done.completion_tokens) == ("done", "stop", len(WORDS))
    assert done.prompt_tokens == PROMPT_TOKENS
    assert done.ttft_ms is not None and done.ttft_ms <= done.elapsed_ms
    assert done.replica == "tiny r1"
    entry = await stack.the_settled()
    assert entry.record.id == done.request_id
    assert (entry.record.source, entry.record.outcome) == ("playground", "ok")
    assert entry.record.ttft_us is not None


async def test_its_errors_are_deltas_with_code_and_status(stack: Stack) -> None:
    (error,) = await everything(stack, temperature=9)
    assert (error.kind, error.status, error.code) == ("error", 400, "invalid_value")
    (error,) = await everything(stack, cache_salt="mine")
    assert error.code == "forbidden_parameter"
    (error,) = await everything(stack, messages=[{"role": "user", "content": "x" * (4 * 1024 * 1024)}])
    assert (error.status, error.code) == (413, "request_too_large")
    assert len(await stack.settled()) == 3


async def test_a_stale_configuration_stops_it_too(stack: Stack) -> None:
    stack.snapshots.change(taken_at=1.0)
    (error,) = await everything(stack)
    assert (error.status, error.code) == (503, "configuration_stale")


async def test_closing_the_iterator_aborts_the_engine_and_settles(stack: Stack) -> None:
    stack.engine.script = endless
    deltas = stack.gateway.inference.chat(PLAYER, chat())
    received = 0
    async for delta in deltas:
        received += delta.kind == "delta"
        if received == 3:
            break
    await deltas.aclose()  # type: ignore[attr-defined]
    entry = await stack.the_settled()  # settled by the time aclose returns
    assert entry.usage is not None
    assert entry.record.outcome == "cancelled"
    assert entry.usage.completion_tokens >= 3
    await (await stack.engine.call()).until_closed()


async def test_a_cancelled_consumer_settles_too(stack: Stack) -> None:
    async def silent(call: EngineCall) -> None:
        await call.until_closed()

    stack.engine.script = silent
    task = asyncio.create_task(everything(stack))
    call = await stack.engine.call()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await call.until_closed()
    assert (await stack.the_settled()).record.outcome == "cancelled"


async def test_one_that_is_closed_before_it_began_ends_at_once(stack: Stack) -> None:
    async def silent(call: EngineCall) -> None:
        await call.until_closed()

    stack.engine.script = silent
    task = asyncio.create_task(everything(stack))
    await asyncio.sleep(0)  # the generator has made its request's task, which has not run yet
    task.cancel()
    await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
    assert (await stack.the_settled()).record.outcome == "cancelled"
    assert stack.engine.calls == []


async def test_a_broken_engine_ends_with_an_error_delta(stack: Stack) -> None:
    stack.engine.script = breaks
    *_, text, error = await everything(stack)
    assert (text.text, error.kind, error.status) == ("some", "error", 502)


async def test_who_has_to_wait_is_told_the_place(root: Path) -> None:
    async def held(call: EngineCall) -> None:
        await go.wait()
        await call.say()

    go = asyncio.Event()
    async with running(root, replica_changes={"max_num_seqs": 1}) as stack:
        stack.engine.script = held
        first = asyncio.create_task(everything(stack))
        await stack.engine.call()
        waiting = stack.gateway.inference.chat(PLAYER, chat())
        place = await anext(waiting)
        assert (place.kind, place.position, place.depth) == ("queued", 1, 1)
        go.set()
        rest = [delta async for delta in waiting]
        assert (rest[0].kind, rest[-1].kind) == ("started", "done")
        assert (await first)[-1].kind == "done"
