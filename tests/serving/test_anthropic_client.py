"""The official Anthropic client, and the requests of a coding agent built on it, against the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from tests.serving.breadth import WEATHER, every_path
from tests.serving.fakes import CACHED_TOKENS, KEY, MODEL, WORDS, Stack, breaks, endless

ANSWER = "".join(WORDS)
MESSAGES: list[Any] = [{"role": "user", "content": "Capital of France?"}]
TOOL: Any = {"name": "weather", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


def aclient(stack: Stack, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**{"base_url": stack.url, "api_key": KEY, "max_retries": 0} | options)


def use_sync(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        message = client.messages.create(model=MODEL, max_tokens=64, messages=MESSAGES, system="Be brief.")
        assert message.content[0].text == ANSWER  # type: ignore[union-attr]
        assert message.id == f"msg_{message._request_id}"
        assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("end_turn", CACHED_TOKENS)
        with client.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES) as stream:
            assert "".join(stream.text_stream) == ANSWER
            assert stream.get_final_message().usage.output_tokens == len(WORDS)
        assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens == 3
        assert [model.id for model in client.models.list()] == ["another", MODEL]


async def test_the_sync_client(stack: Stack) -> None:
    stack.engine.script = every_path
    await asyncio.to_thread(use_sync, stack.url)


async def test_the_async_client_with_a_bearer_token(stack: Stack) -> None:
    async with aclient(stack, api_key=None, auth_token=KEY) as client:
        many = [client.messages.create(model=MODEL, max_tokens=64, messages=MESSAGES) for _ in range(20)]
        assert {answer.content[0].text for answer in await asyncio.gather(*many)} == {ANSWER}  # type: ignore[union-attr]
    assert len(await stack.settled()) == 20


async def test_a_round_of_tools(stack: Stack) -> None:
    stack.engine.script = every_path
    async with aclient(stack) as client:
        async with client.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES, tools=[TOOL]) as stream:
            answer = await stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        text, weather, clock = answer.content
        assert (text.type, weather.type, clock.type) == ("text", "tool_use", "tool_use")
        assert weather.input == json.loads(WEATHER)  # type: ignore[union-attr]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": "Rain"}
            for use in (weather, clock)  # type: ignore[union-attr]
        ]
        history: list[Any] = [*MESSAGES, {"role": "assistant", "content": answer.content}]
        history.append({"role": "user", "content": results})
        again = await client.messages.create(model=MODEL, max_tokens=64, messages=history)
        assert again.content[0].text == ANSWER  # type: ignore[union-attr]
    roles = [message["role"] for message in stack.engine.calls[1].body["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]


async def test_errors_become_the_clients_own_classes(stack: Stack) -> None:
    async with aclient(stack) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="none", max_tokens=1, messages=MESSAGES)
        assert missing.value.request_id
        with pytest.raises(anthropic.BadRequestError) as bad:
            await client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES, extra_body={"temperature": 7})
        assert "temperature" in bad.value.body["error"]["message"]  # type: ignore[index, call-overload]
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="fl-nope").models.list()


async def test_a_fault_in_a_stream_is_raised_after_the_text(stack: Stack) -> None:
    stack.engine.script = breaks
    received = ""
    async with aclient(stack) as client:
        with pytest.raises(anthropic.APIStatusError, match="connection to the engine"):
            async with client.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES) as stream:
                async for text in stream.text_stream:
                    received += text
    assert received == "some"


async def test_closing_a_stream_early_aborts_the_engine(stack: Stack) -> None:
    stack.engine.script = endless
    async with aclient(stack) as client:
        async with client.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES) as stream:
            async for _ in stream.text_stream:
                break
        await (await stack.engine.call()).until_closed()
    assert (await stack.the_settled()).record.outcome == "cancelled"


async def test_a_coding_agents_request_works_unmodified(stack: Stack) -> None:
    """What such agents send: marks for caches, thinking, beta headers and fields, and a query that nobody reads."""
    mark = {"type": "ephemeral"}
    body = {
        "model": MODEL,
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": "Work in the folder.", "cache_control": mark},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Be careful.</system-reminder>"},
                    {"type": "text", "text": "List the files.", "cache_control": mark},
                ],
            }
        ],
        "tools": [TOOL | {"cache_control": mark, "eager_input_streaming": True}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "metadata": {"user_id": "user_0000_account__session_1111"},
        "temperature": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    headers = {
        "x-api-key": KEY,
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
        "x-stainless-retry-count": "0",
    }
    route = stack.snapshots.snapshot.routes[MODEL]
    stack.snapshots.change(routes={MODEL: msgspec.structs.replace(route, max_model_len=131072)})
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, verify=False, timeout=10) as client:
        answer = await client.post("/v1/messages?beta=true", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.text.startswith("event: message_start\n") and "event: message_stop\n" in answer.text
        assert (await client.head("/v1/models")).status_code == 200
    assert (await stack.the_settled()).record.outcome == "ok"
