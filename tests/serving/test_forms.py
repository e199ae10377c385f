"""Structured output and function calling through the gateway: passed on untouched, put together whole, never kept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest

from tests.serving.conftest import chat, events
from tests.serving.fakes import KEY, MODEL, EngineCall, Stack

CHAT = "/v1/chat/completions"
ARGUMENTS = '{"city": "Pa\\"ris", "stop": "END"}'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def calling(*pieces: str, content: str = "", reason: str = "tool_calls", size: int = 3) -> Any:
    """An engine that says `content`, then calls once with each of `pieces` as arguments, a few characters a chunk."""

    async def script(call: EngineCall) -> None:
        await call.head()
        if content:
            await call.token(content)
        for index, piece in enumerate(pieces):
            function = {"name": "get_weather", "arguments": ""}
            await part(call, {"index": index, "id": f"call_{index}", "type": "function", "function": function})
            for at in range(0, len(piece), size):
                await part(call, {"index": index, "function": {"arguments": piece[at : at + size]}})
        await call.finish(reason)

    return script


async def part(call: EngineCall, entry: dict[str, Any]) -> None:
    call.sent_tokens += 1
    choice = {"index": 0, "delta": {"tool_calls": [entry]}, "logprobs": None, "finish_reason": None}
    await call.event(call.chunk(choice))


@pytest.mark.parametrize(
    ("sent", "reaches"),
    [
        ({"response_format": {"type": "json_object"}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}}, None),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, None),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, None),
        ({"structured_outputs": {"regex": "a+"}}, None),
        ({"structured_outputs": {"json": PARAMETERS}}, None),
        ({"guided_json": PARAMETERS}, {"structured_outputs": {"json": PARAMETERS}}),
        ({"guided_regex": "a"}, {"structured_outputs": {"regex": "a"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_grammar": "root ::= x"}, {"structured_outputs": {"grammar": "root ::= x"}}),
    ],
)
async def test_what_asks_for_a_form_reaches_the_engine_and_its_content_no_record(
    stack: Stack, client: httpx.AsyncClient, sent: dict[str, Any], reaches: dict[str, Any] | None
) -> None:
    assert (await client.post(CHAT, json=chat(**sent))).status_code == 200
    body = (await stack.engine.call()).body
    wanted = reaches or sent
    assert {name: body.get(name) for name in wanted} == wanted
    kept = msgspec.to_builtins((await stack.the_settled()).detail)["params"]
    assert kept.keys() == {"stream", *wanted}
    assert "city" not in json.dumps(kept) and "a+" not in json.dumps(kept)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
        ({"functions": []}, "functions"),
    ],
)
async def test_a_bad_form_names_the_field(
    stack: Stack, client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json=chat(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert stack.engine.calls == []


async def test_an_extra_reaches_only_engines_whose_adapter_lists_it(stack: Stack, client: httpx.AsyncClient) -> None:
    snapshot = stack.snapshots.snapshot
    narrow = {
        id: msgspec.structs.replace(replica, extras=frozenset(("top_k",))) for id, replica in snapshot.replicas.items()
    }
    stack.snapshots.change(replicas=narrow)
    assert (await client.post(CHAT, json=chat(top_k=5))).status_code == 200
    response = await client.post(CHAT, json=chat(guided_regex="a"))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "structured_outputs", "unknown_parameter")
    assert len(stack.engine.calls) == 1


@pytest.mark.parametrize("stop", [None, ["END", "city"]])
@pytest.mark.parametrize("size", [1, 3, 100])
async def test_calls_pass_untouched_and_are_the_same_whole(
    stack: Stack, client: httpx.AsyncClient, stop: list[str] | None, size: int
) -> None:
    """Stop strings are looked for in content; arguments are data."""
    stack.engine.script = calling(ARGUMENTS, "{}", content="Let me see: E", size=size)
    whole = (await client.post(CHAT, json=chat(tools=TOOLS, stop=stop))).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Let me see: E"
    assert [call["function"]["arguments"] for call in whole["message"]["tool_calls"]] == [ARGUMENTS, "{}"]
    assert whole["message"]["tool_calls"][0] == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": ARGUMENTS},
    }
    streamed = events((await client.post(CHAT, json=chat(tools=TOOLS, stop=stop, stream=True))).text)
    order, arguments = [], ""
    for choice in (event["choices"][0] for event in streamed if event != "[DONE]"):
        delta = choice["delta"]
        order += ["content"] if delta.get("content") else []
        for entry in delta.get("tool_calls", ()):
            order.append("call")
            arguments += entry["function"]["arguments"] if entry["index"] == 0 else ""
    assert arguments == ARGUMENTS
    assert order == sorted(order, reverse=True), "text before a call comes before it"
    assert streamed[-2]["choices"][0]["finish_reason"] == "tool_calls"
    whole_one, streamed_one = await stack.settled()
    for settled in (whole_one, streamed_one):
        assert settled.record.finish_reason == "tool_calls"
        assert settled.usage is not None and settled.usage.completion_tokens == (await stack.engine.call()).sent_tokens
        assert "Pa" not in json.dumps(msgspec.to_builtins(settled))


async def test_a_call_alone_has_null_content(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = calling(ARGUMENTS, reason="stop")
    choice = (await client.post(CHAT, json=chat(tools=TOOLS))).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop"


async def test_a_history_with_calls_reaches_the_engine(stack: Stack, client: httpx.AsyncClient) -> None:
    calls = [{"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
    ]
    assert (await client.post(CHAT, json=chat(messages=messages))).status_code == 200
    sent = (await stack.engine.call()).body["messages"]
    assert sent[1]["tool_calls"] == calls
    assert sent[2] == messages[2]


class Person(pydantic.BaseModel):
    name: str
    age: int


def use_the_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        parsed = client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "who?"}], response_format=Person
        )
        assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)


async def test_the_official_client_parses_into_a_model(stack: Stack) -> None:
    async def script(call: EngineCall) -> None:
        await call.say(['{"name": ', '"Ada", ', '"age": 36}'])

    stack.engine.script = script
    await asyncio.to_thread(use_the_client, stack.url)
    assert (await stack.engine.call()).body["response_format"]["json_schema"]["name"] == "Person"
