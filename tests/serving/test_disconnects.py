"""Clients that leave, read slowly, or are cut by a stop: the engine is aborted, each settles exactly once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import chat, connected, events
from tests.serving.fakes import KEY, PROMPT_TOKENS, EngineCall, Stack, running

CHAT = "/v1/chat/completions"


class RawClient:
    """A client that can do what well-behaved ones do not: read a little, stop reading, hang up anywhere."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.received = b""

    @classmethod
    async def posting(cls, stack: Stack, *, stream: bool, complete: bool = True) -> RawClient:
        body = json.dumps(chat(stream=stream)).encode()
        # a small receive window, so that not reading is felt soon
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port, limit=4096)
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        writer.write(body if complete else body[:-1])
        await writer.drain()
        return cls(reader, writer)

    async def read_until(self, marker: bytes) -> None:
        while marker not in self.received:
            data = await self.reader.read(4096)
            assert data, self.received
            self.received += data

    @property
    def tokens(self) -> int:
        return self.received.count(b'"content": "w')

    def hang_up(self) -> None:
        self.writer.transport.abort()


async def endless(call: EngineCall) -> None:
    """Words until the connection closes."""
    call.note("QUEUED")
    call.note("SCHEDULED", cached_tokens=0)
    call.note("FIRST_TOKEN")
    await call.head()
    extra = {"fanlight": call.report()}
    while not call.closed.is_set():
        await call.token("w ", **extra)
        extra = {}
        await asyncio.sleep(0.002)


async def silent(call: EngineCall) -> None:
    await call.until_closed()


async def test_leaving_a_stream_aborts_the_engine_and_bills(stack: Stack) -> None:
    stack.engine.script = endless
    client = await RawClient.posting(stack, stream=True)
    await client.read_until(b'"w "},')
    client.hang_up()
    call = await stack.engine.call()
    await call.until_closed()  # the script never ends by itself
    entry = await stack.the_settled()
    assert entry.usage is not None
    assert entry.record.outcome == "cancelled"
    assert entry.usage.prompt_tokens == PROMPT_TOKENS
    assert client.tokens <= entry.usage.completion_tokens <= call.sent_tokens
    names = [name for name, *_ in entry.detail.phases]
    assert "decode" in names


async def test_leaving_without_streaming_aborts_the_engine_too(stack: Stack) -> None:
    stack.engine.script = endless
    client = await RawClient.posting(stack, stream=False)
    call = await stack.engine.call()
    while not call.sent_tokens:
        await asyncio.sleep(0.002)
    client.hang_up()
    await call.until_closed()
    entry = await stack.the_settled()
    assert entry.usage is not None
    assert (entry.record.outcome, entry.record.status) == ("cancelled", 499)
    assert 0 <= entry.usage.completion_tokens <= call.sent_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token(stack: Stack, stream: bool) -> None:
    stack.engine.script = silent
    client = await RawClient.posting(stack, stream=stream)
    call = await stack.engine.call()
    client.hang_up()
    await call.until_closed()
    entry = await stack.the_settled()
    assert entry.usage is not None
    assert (entry.record.outcome, entry.usage.completion_tokens) == ("cancelled", 0)


async def test_leaving_while_sending_the_body_never_reaches_an_engine(stack: Stack) -> None:
    client = await RawClient.posting(stack, stream=True, complete=False)
    while not stack.in_flight:
        await asyncio.sleep(0.002)
    client.hang_up()
    assert (await stack.the_settled()).record.outcome == "cancelled"
    assert stack.engine.calls == []


async def test_leaving_while_waiting_between_attempts(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(call: EngineCall) -> None:
        call.die()

    monkeypatch.setattr("serving.pipeline.BACKOFF_S", 30.0)
    stack.engine.script = die
    client = await RawClient.posting(stack, stream=True)
    await stack.engine.call()
    await asyncio.sleep(0.02)
    client.hang_up()
    assert (await stack.the_settled()).record.outcome == "cancelled"


async def test_hanging_up_anywhere_leaves_exactly_one_settled_each(stack: Stack) -> None:
    """Sixty clients, streaming and not, gone after a random number of bytes or none."""
    stack.engine.script = endless
    dice = random.Random(7)

    async def one(stream: bool) -> int:
        client = await RawClient.posting(stack, stream=stream)
        wanted = dice.randrange(6)
        while stream and client.tokens < wanted:
            client.received += await client.reader.read(256)
        if not stream:
            await asyncio.sleep(dice.random() * 0.05)
        client.hang_up()
        return client.tokens

    received = await asyncio.gather(*(one(stream=number % 2 == 0) for number in range(60)))
    # one that hung up before the server read its request was never there
    await asyncio.gather(*(call.until_closed() for call in stack.engine.calls))
    entries = await stack.settled()
    ids = [entry.record.id for entry in entries]
    assert len(set(ids)) == len(ids)
    opened = [e for e in stack.entries() if type(e).__name__ == "Opened"]
    assert {e.id for e in opened} <= set(ids)
    assert sum(e.usage.completion_tokens for e in entries if e.usage) >= sum(received)
    assert {entry.record.outcome for entry in entries} == {"cancelled"}


async def test_a_client_that_does_not_read_is_cut_off(root: Path) -> None:
    async def flood(call: EngineCall) -> None:
        await call.head()
        while not call.closed.is_set():
            await call.token("w" * 8000)

    async with running(root, unsent_bytes_limit=200_000) as stack:
        stack.engine.script = flood
        client = await RawClient.posting(stack, stream=True)
        await client.read_until(b"data: ")
        entry = await stack.the_settled()
        assert entry.usage is not None
        assert entry.record.outcome == "slow_reader"
        assert entry.usage.completion_tokens > 0
        await (await stack.engine.call()).until_closed()
        client.hang_up()


async def test_a_slow_client_under_the_bound_gets_everything(root: Path) -> None:
    words = [f"w{number:05d}" for number in range(3000)]

    async def quick(call: EngineCall) -> None:
        await call.say(words)

    async with running(root) as stack:
        stack.engine.script = quick
        client = await RawClient.posting(stack, stream=True)
        await client.read_until(b"data: ")
        await client.read_until(b"[DONE]")
        assert client.tokens == len(words)
        assert (await stack.the_settled()).record.outcome == "ok"
        client.hang_up()


async def test_stopping_lets_running_requests_finish_and_takes_no_new_ones(root: Path) -> None:
    async def slow(call: EngineCall) -> None:
        await call.say(gap_s=0.03)

    async with running(root) as stack, connected(stack) as client:
        stack.engine.script = slow
        running_one = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
        await stack.engine.call()
        stopping = asyncio.create_task(stack.gateway.shutdown())
        await asyncio.sleep(0)
        refused = await client.post(CHAT, json=chat())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_shutting_down"
        assert (await running_one).text.endswith("data: [DONE]\n\n")
        await stopping
        assert sorted(e.record.outcome for e in await stack.settled()) == ["ok", "rejected"]


async def test_who_asks_between_the_drain_and_the_end_is_refused_and_recorded(root: Path) -> None:
    async with running(root) as stack, connected(stack) as client:
        await stack.gateway.drain()
        for _ in range(2):
            assert (await client.post(CHAT, json=chat())).json()["error"]["code"] == "server_shutting_down"
        assert [e.record.outcome for e in await stack.settled()] == ["rejected", "rejected"]
        await stack.gateway.shutdown()


async def test_stopping_cuts_what_outlives_the_drain_and_settles_it(root: Path) -> None:
    async with running(root, drain_s=0.1) as stack, connected(stack) as client:
        stack.engine.script = endless

        async def parts() -> AsyncIterator[str]:
            async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
                async for text in response.aiter_text():
                    yield text

        received = ""
        async for text in parts():
            if not received:
                stopping = asyncio.create_task(stack.gateway.shutdown())
            received += text
        await stopping
        assert events(received)[-1]["error"]["code"] == "server_shutting_down"
        entry = await stack.the_settled()
        assert entry.usage is not None
        assert entry.record.outcome == "error"
        assert entry.usage.completion_tokens > 0


async def test_a_server_that_cancels_its_task_still_settles(stack: Stack) -> None:
    """As uvicorn does when it is told to stop at once."""
    stack.engine.script = endless
    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": headers,
        "client": ("127.0.0.1", 1),
    }
    asked = [{"type": "http.request", "body": json.dumps(chat(stream=True)).encode(), "more_body": False}]
    sent: list[object] = []

    async def receive() -> dict[str, object]:
        if asked:
            return asked.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: object) -> None:
        sent.append(message)

    task = asyncio.create_task(stack.gateway.http(scope, receive, send))  # type: ignore[arg-type]
    while len(sent) < 4:
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    entry = await stack.the_settled()
    assert (entry.record.outcome, entry.record.code) == ("error", "server_shutting_down")
    assert b"server_shutting_down" in sent[-1]["body"]  # type: ignore[index]
    await (await stack.engine.call()).until_closed()


async def test_a_client_may_pipeline_requests_on_one_connection(stack: Stack, client: httpx.AsyncClient) -> None:
    for stream in (True, False, True):
        assert (await client.post(CHAT, json=chat(stream=stream))).status_code == 200
    assert [e.record.outcome for e in await stack.settled()] == ["ok"] * 3
