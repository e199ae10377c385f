"""Stop strings are held in the gateway: they never leak, never reach the engine, and stop it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.serving.conftest import chat, events, text_of
from tests.serving.fakes import MODEL, PROMPT_TOKENS, EngineCall, Stack

CHAT = "/v1/chat/completions"


def saying(*words: str, finish: str = "stop"):  # type: ignore[no-untyped-def]
    async def script(call: EngineCall) -> None:
        await call.say(words, finish=finish)

    return script


def endless_after(*words: str):  # type: ignore[no-untyped-def]
    async def script(call: EngineCall) -> None:
        await call.head()
        for word in words:
            await call.token(word)
        while not call.closed.is_set():
            await call.token(" more")
            await asyncio.sleep(0.005)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_over_several_chunks_does_not_leak_and_aborts(
    stack: Stack, client: httpx.AsyncClient, stream: bool
) -> None:
    stack.engine.script = endless_after("Hello ", "#", "#", "# tail")
    response = await client.post(CHAT, json=chat(stream=stream, stop="###"))
    if stream:
        chunks = events(response.text)[:-1]
        assert text_of(chunks) == "Hello "
        assert chunks[-1]["choices"][0] == {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
        }
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello ", "stop")
    call = await stack.engine.call()
    await call.until_closed()
    assert "stop" not in call.body
    entry = await stack.the_settled()
    assert entry.usage is not None
    assert entry.record.outcome == "ok"
    assert entry.usage.prompt_tokens == PROMPT_TOKENS
    assert 4 <= entry.usage.completion_tokens <= call.sent_tokens


async def test_a_tail_that_only_looked_like_a_stop_is_shown(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = saying("a", "#", "#")
    *chunks, _ = events((await client.post(CHAT, json=chat(stream=True, stop=["###", "zz"]))).text)
    assert text_of(chunks) == "a##"
    assert chunks[-1]["choices"][0]["delta"] == {}


async def test_nothing_before_the_stop_gives_an_empty_answer(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = endless_after("STOP")
    body = (await client.post(CHAT, json=chat(stop=["STOP"]))).json()
    assert body["choices"][0]["message"]["content"] == ""
    *chunks, done = events((await client.post(CHAT, json=chat(stop=["STOP"], stream=True))).text)
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert done == "[DONE]"


async def test_each_choice_stops_for_itself(stack: Stack, client: httpx.AsyncClient) -> None:
    async def script(call: EngineCall) -> None:
        await call.head()
        await call.token("one", 0)
        await call.token("un!", 1)
        await call.token("!ignored", 0)
        await call.token("also ignored", 1)
        await call.until_closed()

    stack.engine.script = script
    stream = events((await client.post(CHAT, json=chat(stream=True, n=2, stop="!"))).text)
    assert (text_of(stream, 0), text_of(stream, 1)) == ("one", "un")
    reasons = [c["finish_reason"] for e in stream[:-1] for c in e["choices"] if c["finish_reason"]]
    assert reasons == ["stop", "stop"]
    await (await stack.engine.call()).until_closed()


async def test_stops_in_completions_and_characters_of_several_bytes(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = endless_after("日", "本", "語", "です")
    body = {"model": MODEL, "prompt": "x", "stop": ["本語"]}
    assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "日"


async def test_logprobs_wait_for_the_text_they_belong_to(stack: Stack, client: httpx.AsyncClient) -> None:
    async def script(call: EngineCall) -> None:
        await call.head()
        for word in ("a", "#", "b"):
            call.sent_tokens += 1
            logprobs = {"content": [{"token": word, "logprob": -1.0, "bytes": None, "top_logprobs": []}]}
            await call.event(call.chunk(call.choice(word) | {"logprobs": logprobs}))
        await call.finish()

    stack.engine.script = script
    body = (await client.post(CHAT, json=chat(stop="##", logprobs=True))).json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == "a#b"
    assert [item["token"] for item in choice["logprobs"]["content"]] == ["a", "#", "b"]
