"""The official client, sync and async, against the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

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
