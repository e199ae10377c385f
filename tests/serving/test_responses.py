"""POST /v1/responses: what is asked of the engine, and what is told of its answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serving.breadth import WEATHER, call_a_tool, think
from tests.serving.fakes import CACHED_TOKENS, MODEL, PROMPT_TOKENS, WORDS, EngineCall, Stack, breaks
from tests.serving.test_messages import named_events

ANSWER = "".join(WORDS)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}

IMAGE = {"type": "input_image", "image_url": "https://example.com/x.png"}


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Capital of France?"} | changes


async def streamed(client: httpx.AsyncClient, **changes: Any) -> list[dict[str, Any]]:
    answer = await client.post("/v1/responses", json=asked(stream=True, **changes))
    events = named_events(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_response_in_one_piece(stack: Stack, client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v1/responses",
        json=asked(
            instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, store=True, user="u", max_output_tokens=9
        ),
    )
    told = answer.json()
    assert told["id"] == f"resp_{answer.headers['x-request-id']}"
    (item,) = told["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]
    assert told["usage"] == {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": CACHED_TOKENS, "cache_write_tokens": 0},
        "output_tokens": len(WORDS),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT_TOKENS + len(WORDS),
    }
    expected = {
        "object": "response",
        "status": "completed",
        "model": MODEL,
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "max_output_tokens": 9,
        "store": False,
        "user": "u",
        "error": None,
        "incomplete_details": None,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
    }
    assert {name: told[name] for name in expected} == expected
    sent = stack.engine.calls[0].body
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
    ]
    assert sent["max_tokens"] == 9 and "store" not in sent
    settled = await stack.the_settled()
    assert settled.record.endpoint == "responses" and len(settled.record.end_user) == 16


async def test_the_events_of_a_stream_come_in_their_order(client: httpx.AsyncClient) -> None:
    events = await streamed(client)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(WORDS),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == ANSWER
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None
    whole = events[-1]["response"]
    assert whole["status"] == "completed" and whole["output"] == [events[-2]["item"]]
    assert whole["usage"]["total_tokens"] == PROMPT_TOKENS + len(WORDS)
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


async def test_calls_are_items_of_their_own(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = call_a_tool
    events = await streamed(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=True)
    message, weather, clock = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (weather["type"], weather["call_id"], weather["name"]) == ("function_call", "call_0", "weather")
    assert (weather["arguments"], clock["arguments"]) == (WEATHER, "{}")
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["item_id"], event["arguments"]) for event in done] == [(weather["id"], WEATHER), (clock["id"], "{}")]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("arguments") for item in added] == [None, "", ""]
    sent = stack.engine.calls[0].body
    function = {"name": "weather", "parameters": TOOL["parameters"], "strict": True}
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", True)


async def test_reasoning_is_an_item_before_the_message(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = think
    reasoning, message = (await client.post("/v1/responses", json=asked())).json()["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm."}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "Paris"
    names = [event["type"] for event in await streamed(client)]
    assert names.count("response.reasoning_text.delta") == 2
    assert names.index("response.reasoning_text.done") < names.index("response.output_text.delta")


async def test_log_probabilities_come_with_their_text(stack: Stack, client: httpx.AsyncClient) -> None:
    entry = {"token": "Yes", "logprob": -0.1, "bytes": [89], "top_logprobs": []}

    async def sure(call: EngineCall) -> None:
        await call.head()
        await call.event(call.chunk(call.choice("Yes") | {"logprobs": {"content": [entry], "refusal": None}}))
        await call.finish()

    stack.engine.script = sure
    events = await streamed(client, top_logprobs=2, include=["message.output_text.logprobs"])
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"] == [[entry]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry]
    assert (stack.engine.calls[0].body["logprobs"], stack.engine.calls[0].body["top_logprobs"]) == (True, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_is_incomplete(stack: Stack, client: httpx.AsyncClient, stream: bool) -> None:
    async def cut(call: EngineCall) -> None:
        await call.say(finish="length")

    stack.engine.script = cut
    answer = await client.post("/v1/responses", json=asked(stream=stream))
    event = named_events(answer.text)[-1] if stream else {"type": "response.incomplete", "response": answer.json()}
    assert event["type"] == "response.incomplete"
    told = event["response"]
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert told["output"][0]["status"] == "incomplete"


async def test_a_fault_in_a_stream_is_told_twice(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = breaks
    *_, error, failed = await streamed(client)
    assert (error["type"], error["code"]) == ("error", "engine_unreachable")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"


async def test_items_become_a_chat(stack: Stack, client: httpx.AsyncClient) -> None:
    said = {"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Wea"}, {"type": "input_text", "text": "ther?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "…"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [said]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}", "id": "fc_2"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Noon"}]},
    ]
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = asked(
        input=items, text={"format": schema}, previous_response_id=None, background=False, truncation="disabled"
    )
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200 and answer.json()["text"]["format"]["schema"] == {"type": "object"}
    sent = stack.engine.calls[0].body
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id, name in (("c1", "weather"), ("c2", "clock"))
    ]
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "Noon"},
    ]
    named = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert sent["response_format"] == {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": {"id": "c"}}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "reasoning"}]}, "input", "invalid_request"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "invalid_value"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "unsupported_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata[...]", "invalid_value"),
        ({"request_id": "mine"}, "request_id", "forbidden_parameter"),
        ({"messages": []}, "messages", "unknown_parameter"),
    ],
)  # fmt: skip
async def test_a_bad_field_is_named(
    stack: Stack, client: httpx.AsyncClient, changes: dict[str, Any], param: str, code: str
) -> None:
    answer = await client.post("/v1/responses", json=asked(**changes))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert stack.engine.calls == []
