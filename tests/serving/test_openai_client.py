"""The official client, sync and async, against the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serving.breadth import VECTORS, WEATHER, every_path
from tests.serving.fakes import (
    CACHED_TOKENS,
    KEY,
    MODEL,
    PROMPT_TOKENS,
    WORDS,
    Stack,
    breaks,
    endless,
    running,
)

ANSWER = "".join(WORDS)
MESSAGES = [{"role": "user", "content": "Capital of France?"}]


def use_sync(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == ANSWER
        assert whole._request_id and whole.id == f"chatcmpl-{whole._request_id}"
        assert whole.usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
        assert chunks[-1].usage.total_tokens == PROMPT_TOKENS + len(WORDS)
        text = client.completions.create(model=MODEL, prompt="The")
        assert text.choices[0].text == ANSWER
        assert [model.id for model in client.models.list()] == ["another", MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as events:  # type: ignore[arg-type]
            assert events.get_final_completion().choices[0].message.content == ANSWER


async def test_the_sync_client(stack: Stack) -> None:
    await asyncio.to_thread(use_sync, stack.url)


async def test_the_async_client(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)  # type: ignore[call-overload]
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == ANSWER
        many = [client.chat.completions.create(model=MODEL, messages=MESSAGES) for _ in range(20)]  # type: ignore[call-overload]
        assert {a.choices[0].message.content for a in await asyncio.gather(*many)} == {ANSWER}
    assert len(await stack.settled()) == 21


async def test_errors_become_the_clients_own_classes(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="none", messages=MESSAGES)  # type: ignore[call-overload]
        assert missing.value.code == "model_not_found" and missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=7)  # type: ignore[call-overload]
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="fl-nope").models.list()


async def test_a_fault_in_a_stream_is_raised_after_the_text(stack: Stack) -> None:
    stack.engine.script = breaks
    received = ""
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=2) as client:
        with pytest.raises(openai.APIError):
            async for chunk in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):  # type: ignore[call-overload]
                received += chunk.choices[0].delta.content or ""
    assert received == "some"


async def test_closing_a_stream_early_aborts_the_engine(root: Path) -> None:
    async with running(root) as stack:
        stack.engine.script = endless
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY) as client:
            async with await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:  # type: ignore[call-overload]
                async for _ in stream:
                    break
            await (await stack.engine.call()).until_closed()
        assert (await stack.the_settled()).record.outcome == "cancelled"


TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}


async def test_responses_whole_and_streamed(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
        whole = await client.responses.create(model=MODEL, input="Capital of France?", instructions="Be brief.")
        assert whole.output_text == ANSWER and whole.status == "completed"
        assert whole.id == f"resp_{whole._request_id}"
        assert whole.usage is not None and whole.usage.input_tokens_details.cached_tokens == CACHED_TOKENS
        async with client.responses.stream(model=MODEL, input="Capital of France?") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == ANSWER


async def test_a_round_of_tools_by_responses(stack: Stack) -> None:
    stack.engine.script = every_path
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = client.responses.stream(model=MODEL, input=asked, tools=[TOOL])  # type: ignore[list-item]
        async with stream as events:
            answer = await events.get_final_response()
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [("weather", WEATHER), ("clock", "{}")]
        asked += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        asked += [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain"} for call in calls]
        again = await client.responses.create(model=MODEL, input=asked)
        assert again.output_text == ANSWER
    roles = [message["role"] for message in stack.engine.calls[1].body["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]


async def test_a_fault_in_a_streamed_response_ends_it_as_failed(stack: Stack) -> None:
    stack.engine.script = breaks
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
        events = [event async for event in await client.responses.create(model=MODEL, input="Hm?", stream=True)]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]


async def test_embeddings_by_default_and_as_floats(stack: Stack) -> None:
    stack.engine.script = every_path
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
        packed = await client.embeddings.create(model=MODEL, input=["one", "two"])
        floats = await client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert [item.embedding for item in packed.data] == [item.embedding for item in floats.data] == VECTORS
    assert packed.usage.prompt_tokens == 10


async def test_the_requests_of_a_chat_page_work_unmodified(stack: Stack) -> None:
    """What Open WebUI sends an OpenAI connection: the whole history, usage with the stream, headers of its own."""
    history = [
        {"role": "system", "content": "User Context:\n\n"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": [{"type": "text", "text": "Capital of France?"}]},
    ]
    body = {"stream": True, "model": MODEL, "messages": history, "stream_options": {"include_usage": True}}
    title = {"model": MODEL, "messages": history[-1:], "stream": False, "max_completion_tokens": 1000}
    headers = {"Authorization": f"Bearer {KEY}", "X-OpenWebUI-User-Name": "Somebody", "X-OpenWebUI-Chat-Id": "1"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, verify=False) as client:
        assert {model["id"] for model in (await client.get("/v1/models")).json()["data"]} == {"another", MODEL}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        whole = await client.post("/v1/chat/completions", json=title)
        assert whole.json()["choices"][0]["message"]["content"] == ANSWER
    assert "Somebody" not in repr(await stack.settled())
