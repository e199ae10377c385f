"""The words of requests: kept for a tenant that chose so, whole or streamed, bounded and redacted; for nobody else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving import apikey
from serving.capture import LIMIT
from serving.port import RequestContent, Said
from tests.serving.conftest import chat, connected
from tests.serving.fakes import KEY, MODEL, SECRET, WORDS, EngineCall, Stack, running

TOKEN = "sk-proj-abcDEF0123456789abcDEF"


def opt_in(stack: Stack) -> None:
    keys = dict(stack.snapshots.snapshot.keys)
    digest = apikey.digest(KEY, SECRET)
    keys[digest] = msgspec.structs.replace(keys[digest], capture_content=True)
    stack.snapshots.change(keys=keys)


async def content_of(stack: Stack) -> RequestContent:
    entry = await stack.the_settled()
    assert entry.content is not None
    assert (entry.content.id, entry.content.tenant_id) == (entry.record.id, entry.record.tenant_id)
    return entry.content


def journal_of(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*.journal"))


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_kept_unless_the_tenant_chose_it(root: Path, stream: bool) -> None:
    async with running(root) as stack, connected(stack) as client:
        assert (await client.post("/v1/chat/completions", json=chat(stream=stream))).status_code == 200
        assert (await stack.the_settled()).content is None
        assert b"France" not in journal_of(root)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_are_kept(root: Path, stream: bool) -> None:
    async with running(root) as stack, connected(stack) as client:
        opt_in(stack)
        assert (await client.post("/v1/chat/completions", json=chat(stream=stream))).status_code == 200
        content = await content_of(stack)
        assert content.prompt == (Said("user", "Capital of France?"),)
        assert content.answer == (Said("assistant", "".join(WORDS)),)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once upon"}),
        ("/v1/responses", {"input": "Once upon"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Once upon"}], "max_tokens": 20}),
    ],
)
async def test_every_endpoint_that_generates_keeps_them(root: Path, path: str, body: dict[str, Any]) -> None:
    async with running(root) as stack, connected(stack) as client:
        opt_in(stack)
        assert (await client.post(path, json={"model": MODEL} | body)).status_code == 200
        content = await content_of(stack)
        assert [said.text for said in content.prompt] == ["Once upon"]
        assert content.answer == (Said("assistant", "".join(WORDS)),)


@pytest.mark.parametrize("stream", [False, True])
async def test_secrets_reach_neither_journal_nor_logs(
    root: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def tells(call: EngineCall) -> None:
        await call.head()
        for part in (f"It is {TOKEN[:9]}", TOKEN[9:], ", keep it."):  # a secret comes in pieces
            await call.token(part)
        await call.finish()

    caplog.set_level(logging.DEBUG, "serving")
    async with running(root) as stack, connected(stack) as client:
        opt_in(stack)
        stack.engine.script = tells
        question = [{"role": "user", "content": f"My key is {TOKEN}; repeat it."}]
        response = await client.post("/v1/chat/completions", json=chat(stream=stream, messages=question))
        assert response.status_code == 200
        content = await content_of(stack)
        assert content.prompt[0].text == "My key is [redacted API key]; repeat it."
        assert content.answer[0].text == "It is [redacted API key], keep it."
        assert TOKEN.encode() not in journal_of(root)
        assert "repeat it" not in caplog.text and "keep it" not in caplog.text


async def test_what_an_abandoned_attempt_said_is_not_kept(root: Path) -> None:
    async def breaks_off(call: EngineCall) -> None:
        await call.head()
        await call.token("half")
        call.die()

    async with running(root, engines=2) as stack, connected(stack) as client:
        opt_in(stack)
        for engine in stack.engines:
            engine.script = breaks_off if engine is stack.engines[0] else engine.script
        for _ in range(2):  # whichever turn it is, one of them meets the broken engine
            assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        for entry in await stack.settled():
            assert entry.content is not None and entry.content.answer == (Said("assistant", "".join(WORDS)),)
        assert max(entry.record.attempts for entry in await stack.settled()) == 2


async def test_long_texts_are_cut_and_say_so(root: Path) -> None:
    async def long(call: EngineCall) -> None:
        await call.head()
        for _ in range(50):
            await call.token("a" * 1000)
        await call.finish()

    old, new = "o" * LIMIT, "漢" * 1000
    async with running(root) as stack, connected(stack) as client:
        opt_in(stack)
        stack.engine.script = long
        messages = [{"role": "user", "content": text} for text in ("oldest", old, new)]
        assert (await client.post("/v1/chat/completions", json=chat(messages=messages))).status_code == 200
        content = await content_of(stack)
        assert [(len(said.text), said.cut) for said in content.prompt] == [(LIMIT - 3000, True), (1000, False)]
        assert content.left_out == 1
        assert content.answer == (Said("assistant", "a" * LIMIT, cut=True),)


async def test_what_never_ran_is_not_kept(root: Path) -> None:
    async with running(root) as stack, connected(stack) as client:
        opt_in(stack)
        stack.snapshots.change(replicas={})
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 503
        assert (await stack.the_settled()).content is None
