"""POST /v1/messages and /v1/messages/count_tokens: what is asked of the engine, and what is told of its answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serving.breadth import WEATHER, call_a_tool, every_path, think, whole
from tests.serving.fakes import CACHED_TOKENS, KEY, MODEL, PROMPT_TOKENS, WORDS, EngineCall, Stack, breaks

TOOL = {"name": "weather", "description": "Looks outside.", "input_schema": {"type": "object", "properties": {}}}

USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Capital of France?"}]} | changes


def named_events(body: str) -> list[dict[str, Any]]:
    """The decoded events of a stream, each under the name that it gives itself."""
    found = []
    for block in body.split("\n\n"):
        if block:
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


async def streamed(client: httpx.AsyncClient, **changes: Any) -> list[dict[str, Any]]:
    answer = await client.post("/v1/messages", json=asked(stream=True, **changes))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return named_events(answer.text)


async def test_a_message_in_one_piece(stack: Stack, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/messages", json=asked(), headers={"anthropic-version": "2023-06-01"})
    request_id = answer.headers["request-id"]
    assert answer.json() == {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "".join(WORDS)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": PROMPT_TOKENS - CACHED_TOKENS,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": CACHED_TOKENS,
            "output_tokens": len(WORDS),
        },
    }
    settled = await stack.the_settled()
    assert (settled.record.endpoint, settled.record.id) == ("messages", request_id)
    assert settled.usage is not None
    assert (settled.usage.prompt_tokens, settled.usage.completion_tokens) == (PROMPT_TOKENS, len(WORDS))
    assert stack.engine.calls[0].path == "/v1/chat/completions"


async def test_the_events_of_a_stream_come_in_their_order(client: httpx.AsyncClient) -> None:
    events = await streamed(client)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * len(WORDS),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, opened = events[0]["message"], events[1]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == PROMPT_TOKENS - CACHED_TOKENS
    assert opened["content_block"] == {"type": "text", "text": ""}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [{"type": "text_delta", "text": word} for word in WORDS]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(WORDS)


async def test_calls_are_blocks_of_their_own(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = call_a_tool
    events = await streamed(client, tools=[TOOL])
    blocks: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            said = event["delta"].get("text", event["delta"].get("partial_json"))
            blocks[event["index"]] = blocks.get(event["index"], "") + said
    opened = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert opened[1:] == [
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {}},
        {"type": "tool_use", "id": "call_1", "name": "clock", "input": {}},
    ]
    assert blocks == {0: "Let me see.", 1: WEATHER, 2: "{}"}
    open_and_shut = [(e["type"], e["index"]) for e in events if e["type"].startswith("content_block_st")]
    assert open_and_shut == [(f"content_block_{what}", index) for index in range(3) for what in ("start", "stop")]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    (_, weather, _) = (await client.post("/v1/messages", json=asked(tools=[TOOL]))).json()["content"]
    assert weather == {"type": "tool_use", "id": "call_0", "name": "weather", "input": json.loads(WEATHER)}


async def test_arguments_that_were_cut_are_kept_as_text(stack: Stack, client: httpx.AsyncClient) -> None:
    async def cut(call: EngineCall) -> None:
        await call.head()
        part = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"city": "Lo'}}
        await call.event(call.chunk({"index": 0, "delta": {"tool_calls": [part]}}))
        await call.finish("length")

    stack.engine.script = cut
    told = (await client.post("/v1/messages", json=asked(tools=[TOOL]))).json()
    assert told["content"][0]["input"] == {"INVALID_JSON": '{"city": "Lo'}
    assert told["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_it_is_told(client: httpx.AsyncClient, stream: bool) -> None:
    answer = await client.post("/v1/messages", json=asked(stop_sequences=["zzz", "the capital"], stream=stream))
    told = named_events(answer.text)[-2]["delta"] if stream else answer.json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "the capital")
    assert "capital" not in answer.text.replace('"the capital"', "")


async def test_reasoning_is_shown_only_where_thinking_is_on(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = think
    quiet = await client.post("/v1/messages", json=asked(thinking={"type": "disabled"}))
    assert quiet.json()["content"] == [{"type": "text", "text": "Paris"}]
    loud = await client.post("/v1/messages", json=asked(thinking={"type": "enabled", "budget_tokens": 1024}))
    assert loud.json()["content"][0] == {"type": "thinking", "thinking": "Hmm.", "signature": ""}
    events = await streamed(client, thinking={"type": "adaptive"})
    assert [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"] == [
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
        "text_delta",
    ]


async def test_a_conversation_reaches_the_engine_as_a_chat(stack: Stack, client: httpx.AsyncClient) -> None:
    cached = {"type": "ephemeral"}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "secret", "signature": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Łódź"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    body = asked(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        messages=turns,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        metadata={"user_id": "someone"},
    )
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    sent = stack.engine.calls[0].body
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Łódź"}'}}
    assert sent["messages"] == [
        {"role": "system", "content": "Be\n\nbrief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Rain"},
        {"role": "user", "content": "And now?"},
    ]
    parameters = TOOL["input_schema"]
    function = {"name": "weather", "description": "Looks outside.", "parameters": parameters}
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert sent["parallel_tool_calls"] is False
    assert [sent[name] for name in ("temperature", "top_p", "top_k", "max_tokens")] == [0.5, 0.9, 7, 64]
    settled = await stack.the_settled()
    assert len(settled.record.end_user) == 16 and "someone" not in repr(settled)
    assert settled.detail.params["tools"] == 1 and "Rain" not in repr(settled)


@pytest.mark.parametrize(
    ("choice", "sent"), [({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none")]
)
async def test_choices_of_tools(stack: Stack, client: httpx.AsyncClient, choice: dict[str, Any], sent: str) -> None:
    await client.post("/v1/messages", json=asked(tools=[TOOL], tool_choice=choice))
    assert stack.engine.calls[0].body["tool_choice"] == sent


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "answered"),
        ({"messages": [{"role": "assistant", "content": "Once"}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "assistant"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"cache_salt": "mine"}, "set by the gateway"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"model": "none"}, "does not exist"),
    ],
)  # fmt: skip
async def test_a_refusal_is_in_the_apis_own_envelope(
    stack: Stack, client: httpx.AsyncClient, changes: dict[str, Any], words: str
) -> None:
    body = {name: value for name, value in asked(**changes).items() if value is not None}
    answer = await client.post("/v1/messages", json=body)
    told = answer.json()
    kind = "not_found_error" if "model" in changes else "invalid_request_error"
    assert answer.status_code == (404 if "model" in changes else 400)
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert words in told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert stack.engine.calls == []


async def test_a_key_may_come_in_either_header(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, verify=False) as nobody:
        for headers in ({"x-api-key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            assert (await nobody.post("/v1/messages", json=asked(), headers=headers)).status_code == 200
        answer = await nobody.post("/v1/messages", json=asked(), headers={"x-api-key": "sk-ant-nothing"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert "sk-ant" not in answer.text
        answer = await nobody.get("/v1/messages", headers={"x-api-key": KEY})
        assert (answer.status_code, answer.json()["type"]) == (405, "error")


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error")])
async def test_faults_of_the_engine_have_anthropics_types(
    stack: Stack, client: httpx.AsyncClient, status: int, kind: str
) -> None:
    async def refuse(call: EngineCall) -> None:
        await call.refuse(status)

    stack.engine.script = refuse
    answer = await client.post("/v1/messages", json=asked())
    assert (answer.status_code, answer.json()["error"]["type"]) == (502 if status == 500 else status, kind)


async def test_a_fault_in_a_stream_is_an_event_of_error(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = breaks
    events = await streamed(client)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert events[-1]["request_id"] == (await stack.the_settled()).record.id


async def test_counting_asks_the_engines_tokenizer_and_costs_nothing(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = every_path
    body = {name: value for name, value in asked(system="Be brief.", tools=[TOOL]).items() if name != "max_tokens"}
    answer = await client.post("/v1/messages/count_tokens", json=body)
    assert answer.json() == {"input_tokens": 3}
    (call,) = stack.engine.calls
    assert call.path == "/tokenize" and call.body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert call.body["tools"][0]["function"]["name"] == "weather" and "max_tokens" not in call.body
    settled = await stack.the_settled()
    assert settled.record.endpoint == "count_tokens"
    assert settled.usage is not None and settled.usage.outcome == "ok"
    assert (settled.usage.prompt_tokens, settled.usage.completion_tokens, settled.usage.cost) == (0, 0, 0)


async def test_a_count_that_cannot_be_read_is_a_fault_of_the_engine(stack: Stack, client: httpx.AsyncClient) -> None:
    async def nonsense(call: EngineCall) -> None:
        await whole(call, {"count": "many"})

    stack.engine.script = nonsense
    body = {name: value for name, value in asked().items() if name != "max_tokens"}
    answer = await client.post("/v1/messages/count_tokens", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "api_error")
