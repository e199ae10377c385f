"""The ordinary case, streaming and not: what is on the wire and what is left behind."""

from __future__ import annotations

import httpx
import pytest

from serving import apikey
from tests.serving.conftest import chat, events, text_of
from tests.serving.fakes import (
    CACHED_TOKENS,
    MODEL,
    PROMPT_TOKENS,
    SECRET,
    WORDS,
    EngineCall,
    Stack,
)

ANSWER = "".join(WORDS)


async def test_an_answer_in_one_piece(stack: Stack, client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=chat())
    assert response.status_code == 200
    body = response.json()
    assert body["id"] == "chatcmpl-" + response.headers["x-request-id"]
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert body["usage"]["completion_tokens"] == len(WORDS)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}
    assert "fanlight" not in response.text


async def test_a_stream_has_openais_shape(stack: Stack, client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=chat(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (
            "chatcmpl-" + response.headers["x-request-id"],
            chunks[0]["created"],
            MODEL,
            "chat.completion.chunk",
        )
    }
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert text_of(chunks) == ANSWER
    assert all("usage" not in c and "fanlight" not in c for c in chunks)


async def test_usage_is_streamed_only_where_asked_for(stack: Stack, client: httpx.AsyncClient) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events((await client.post("/v1/chat/completions", json=body)).text)
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == PROMPT_TOKENS + len(WORDS)
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(stack: Stack, client: httpx.AsyncClient, stream: bool) -> None:
    response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "The", "stream": stream})
    if stream:
        *chunks, done = events(response.text)
        assert done == "[DONE]"
        assert {c["object"] for c in chunks} == {"text_completion"}
        assert text_of(chunks) == ANSWER
    else:
        body = response.json()
        assert body["id"].startswith("cmpl-")
        assert body["choices"][0]["text"] == ANSWER
    assert (await stack.engine.call()).path == "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_gets(stack: Stack, client: httpx.AsyncClient, stream: bool) -> None:
    """Always a stream with usage; identity from us; stop strings stay here."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = chat(
        stream=stream,
        stop=["###"],
        user="u-1",
        temperature=0.5,
        top_k=5,
        max_tokens=9,
        max_completion_tokens=7,
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": None}],
    )
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    response = await client.post("/v1/chat/completions", json=body, headers=headers)
    call = await stack.engine.call()
    assert call.body == {
        "model": "engine-tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": None}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5,
        "top_k": 5,
        "max_tokens": 7,
        "request_id": response.headers["x-request-id"],
        "cache_salt": apikey.cache_salt("tenant-1", SECRET),
    }
    assert call.headers["x-request-id"] == response.headers["x-request-id"]
    assert call.headers["x-fanlight-timeline"] == "1"
    assert call.headers["traceparent"].split("-")[1] == trace
    assert response.headers["traceparent"] == call.headers["traceparent"]
    assert "authorization" not in call.headers


async def test_the_record_of_an_answer(stack: Stack, client: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "mine"}
    response = await client.post("/v1/chat/completions", json=chat(stream=True, user="u-1"), headers=headers)
    entry = await stack.the_settled()
    usage, record, detail = entry.usage, entry.record, entry.detail
    assert usage is not None
    assert usage.id == record.id == detail.id == response.headers["x-request-id"]
    assert (usage.outcome, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (
        "ok",
        PROMPT_TOKENS,
        CACHED_TOKENS,
        len(WORDS),
    )
    assert (usage.tenant_id, usage.key_id, usage.model, usage.price_version) == (
        "tenant-1",
        "key-of-tenant-1",
        MODEL,
        7,
    )
    assert record.client_request_id == "mine"
    assert record.end_user == apikey.end_user("tenant-1", "u-1", SECRET)
    assert (record.replica_id, record.device, record.status, record.attempts) == (
        "replica-1",
        "cpu",
        200,
        1,
    )
    assert record.finish_reason == "stop"
    assert record.ttft_us is not None and 0 < record.ttft_us <= record.duration_us
    assert detail.clock == "shared"
    assert detail.decision["reason"] == "the only replica that can take it"
    assert 0 < detail.decision["at"] < record.duration_us and 0 <= detail.decision["took_us"] < record.duration_us
    (candidate,) = detail.candidates
    assert candidate["verdict"] == "chosen" and candidate["kv_usage"] == 0.25
    assert len(detail.gaps) == len(WORDS) - 1
    assert detail.engine["computed_tokens"] == PROMPT_TOKENS - CACHED_TOKENS
    assert "France" not in str(detail)


async def test_the_same_client_request_id_twice_is_two_requests(stack: Stack, client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await client.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "same"})
    first, second = await stack.settled()
    assert first.record.id != second.record.id
    assert first.record.client_request_id == second.record.client_request_id == "same"


async def test_several_choices_interleave_and_close_each_for_itself(stack: Stack, client: httpx.AsyncClient) -> None:
    async def script(call: EngineCall) -> None:
        await call.head()
        for index, word in ((0, "a"), (1, "x"), (0, "b"), (1, "y")):
            await call.token(word, index)
        for index in (1, 0):
            await call.event(call.chunk(call.choice(None, index, "length")))
        await call.event(call.chunk())
        await call.event(b"[DONE]")
        await call.end()

    stack.engine.script = script
    body = (await client.post("/v1/chat/completions", json=chat(n=2))).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "ab", "length"),
        (1, "xy", "length"),
    ]
    stream = events((await client.post("/v1/chat/completions", json=chat(n=2, stream=True))).text)
    assert (text_of(stream, 0), text_of(stream, 1)) == ("ab", "xy")
    assert [e.usage.completion_tokens for e in await stack.settled() if e.usage] == [4, 4]


async def test_text_in_the_finish_chunk_is_split_from_it(stack: Stack, client: httpx.AsyncClient) -> None:
    async def script(call: EngineCall) -> None:
        await call.head()
        call.sent_tokens = 1
        await call.event(call.chunk(call.choice("end", finish="length")))
        await call.event(b"[DONE]")
        await call.end()

    stack.engine.script = script
    *chunks, _ = events((await client.post("/v1/chat/completions", json=chat(stream=True))).text)
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-2]["choices"][0]["finish_reason"] is None
    assert text_of(chunks) == "end"


async def test_tool_call_parts_are_relayed_and_put_together(stack: Stack, client: httpx.AsyncClient) -> None:
    parts = [
        {
            "index": 0,
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": ""},
        },
        {"index": 0, "function": {"arguments": '{"city": "Pa'}},
        {"index": 0, "function": {"arguments": 'ris"}'}},
    ]

    async def script(call: EngineCall) -> None:
        await call.head()
        for part in parts:
            call.sent_tokens += 1
            choice = {"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None}
            await call.event(call.chunk(choice))
        await call.finish("tool_calls")

    stack.engine.script = script
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = (await client.post("/v1/chat/completions", json=chat(tools=tools))).json()
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
        }
    ]
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    stream = events((await client.post("/v1/chat/completions", json=chat(tools=tools, stream=True))).text)
    relayed = [c["choices"][0]["delta"]["tool_calls"][0] for c in stream[1:-2]]
    assert relayed == parts


async def test_characters_split_over_reads_arrive_whole(stack: Stack, client: httpx.AsyncClient) -> None:
    word = "日本語🙂é"

    async def script(call: EngineCall) -> None:
        import json

        await call.head()
        call.sent_tokens = 1
        data = b"data: " + json.dumps(call.chunk(call.choice(word)), ensure_ascii=False).encode() + b"\r\n\r\n"
        for at in range(len(data)):
            await call.raw(data[at : at + 1])
        await call.finish()

    stack.engine.script = script
    *chunks, _ = events((await client.post("/v1/chat/completions", json=chat(stream=True))).text)
    assert text_of(chunks) == word


async def test_an_engine_that_tells_no_usage_is_billed_by_what_it_sent(stack: Stack, client: httpx.AsyncClient) -> None:
    async def script(call: EngineCall) -> None:
        await call.head()
        for word in ("a", "b", "c"):
            await call.event(call.chunk(call.choice(word), usage=False))
        await call.event(call.chunk(call.choice(None, finish="stop"), usage=False))
        await call.event(b"[DONE]")
        await call.end()

    stack.engine.script = script
    response = await client.post("/v1/chat/completions", json=chat())
    assert response.json()["usage"]["completion_tokens"] == 3
    entry = await stack.the_settled()
    assert entry.usage is not None and entry.usage.completion_tokens == 3
    assert entry.detail.engine["usage_reported"] is False
    assert {name for name, *_ in entry.detail.phases} >= {"connect", "engine", "deliver"}


async def test_connections_are_reused(stack: Stack, client: httpx.AsyncClient) -> None:
    for _ in range(5):
        await client.post("/v1/chat/completions", json=chat())
        await stack.idle()
    assert len(stack.engine.calls) == 5
    assert stack.engine.connections == 1


async def test_a_restarted_replica_gets_new_connections(stack: Stack, client: httpx.AsyncClient) -> None:
    from tests.serving.fakes import replica

    await client.post("/v1/chat/completions", json=chat())
    stack.snapshots.change(replicas={"replica-1": replica(stack.engine.path, epoch=2)})
    await client.post("/v1/chat/completions", json=chat())
    assert stack.engine.connections == 2
