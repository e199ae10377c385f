"""The official client, sync and async, against a running installation."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import openai
import pydantic
import pytest

from bench.stack import MODEL, Stack, eventually, now

PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(stack: Stack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)


def test_paris_is_the_answer_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0)
    streamed = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert "Paris" in text
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


async def test_the_async_client_runs_requests_side_by_side(stack: Stack, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=8)
                for _ in range(6)
            )
        )
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_models_are_listed_with_their_context(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed[MODEL].max_model_len == 8192  # type: ignore[attr-defined]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completions_and_usage_on_request(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=6, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stop_string_never_leaks(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, stop=["Paris"])
    assert answer.choices[0].message.content == "The capital of France is "
    assert answer.choices[0].finish_reason == "stop"


def test_errors_have_the_class_the_code_and_a_request_id(stack: Stack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=PARIS)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=PARIS, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="fl-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as who:
        stranger.models.list()
    assert who.value.code == "invalid_api_key"
    assert "fl-wrong" not in str(who.value)


def test_a_revoked_key_stops_working(stack: Stack) -> None:
    import json

    made = json.loads(stack.manage("key", "create", "--tenant", "default", "--json"))
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=made["key"], max_retries=0)
    eventually(lambda: client.models.list().data, 5, openai.AuthenticationError)
    stack.manage("key", "revoke", made["id"])

    def refused() -> bool:
        try:
            client.models.list()
        except openai.AuthenticationError as error:
            return "revoked" in str(error)
        return False

    eventually(refused, 5)


def test_every_request_is_in_the_ledger_under_its_own_id(stack: Stack, client: openai.OpenAI) -> None:
    since = now()
    answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=PARIS, temperature=0)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=PARIS, temperature=9)
    records = {record["request_id"]: record for record in stack.settled(since, 2)}
    record = records[answer.headers["x-request-id"]]
    usage = answer.parse().usage
    assert usage is not None
    assert (record["prompt_tokens"], record["completion_tokens"]) == (
        usage.prompt_tokens,
        usage.completion_tokens,
    )
    assert (record["tenant"], record["outcome"], record["model"]) == ("default", "ok", MODEL)
    assert sorted(each["outcome"] for each in records.values()) == ["ok", "rejected"]


def test_another_tenants_identical_prompt_shares_no_block(stack: Stack, client: openai.OpenAI) -> None:
    stack.manage("tenant", "create", "elsewhere")
    other = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key("elsewhere"), max_retries=0)
    eventually(lambda: other.models.list().data, 5, openai.AuthenticationError)
    story = "A shared story. " + "The lamp was lit again. " * 90
    prompt: list[Any] = [
        {"role": "system", "content": story},
        {"role": "user", "content": "Go on."},
    ]

    def cached(each: openai.OpenAI) -> int:
        usage = each.chat.completions.create(model=MODEL, messages=prompt, max_tokens=1, temperature=0).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(client), cached(client) > 0, cached(other), cached(other) > 0] == [
        0,
        True,
        0,
        True,
    ]


def test_a_trace_covers_the_request_on_one_clock(stack: Stack, client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=PARIS,
        max_tokens=24,
        extra_headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"},
    )
    trace = stack.trace(answer.headers["x-request-id"])
    record, detail = trace["record"], trace["detail"]
    assert record["trace_id"] == "ab" * 16
    assert detail["clock"] == "shared"
    assert record["unattributed_us"] <= 0.05 * record["duration_us"]
    names = [phase[0] for phase in detail["phases"]]
    assert {"auth", "routing", "connect", "engine_queue", "prefill", "decode", "settle"} <= set(names)
    assert detail["candidates"][0]["verdict"] == "chosen"
    assert detail["decision"]["reason"]


def test_a_killed_worker_is_told_replaced_and_explained(stack: Stack, client: openai.OpenAI) -> None:
    pid = stack.pid("worker")
    stream = client.chat.completions.create(
        model=MODEL, messages=PARIS, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
    )
    with pytest.raises((openai.APIError, openai.APIConnectionError)):
        for number, _chunk in enumerate(stream):
            if number == 5:
                os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: client.chat.completions.create(model=MODEL, messages=PARIS, max_tokens=2),
        60,
        openai.APIError,
    )
    assert stack.pid("worker") != pid
    assert "SIGKILL" in stack.manage("transitions", "--json")


WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=99)


def test_a_call_comes_whole_or_in_parts_and_the_conversation_goes_on(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": PARIS, "tools": WEATHER, "temperature": 0, "max_tokens": 60}
    asked |= {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    whole = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert whole.choices[0].finish_reason == "stop"
    streamed = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    parts = [part for delta in streamed for part in delta.tool_calls or []]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert "".join(delta.content or "" for delta in streamed) == ""
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    again = client.chat.completions.create(
        model=MODEL, messages=[*PARIS, whole.choices[0].message, result], max_tokens=10
    )
    assert again.choices[0].message.content


def test_answers_come_in_the_form_asked_for(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=PARIS, response_format=Person, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    for extra in ({"guided_choice": ["red"]}, {"structured_outputs": {"regex": "red"}}):
        answer = client.chat.completions.create(model=MODEL, messages=PARIS, extra_body=extra)
        assert answer.choices[0].message.content == "red"


def test_a_form_that_cannot_be_held_is_refused_with_the_engines_words(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=PARIS, response_format=wanted)
    assert refused.value.param == "response_format"
    assert "unsupported schema keyword: not" in refused.value.message
