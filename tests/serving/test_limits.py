"""Limits of keys and tenants at the gateway: each one, streaming and not, named when it refuses, given back after."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from serving import apikey
from serving.port import Budget, Limits
from tests.serving.conftest import chat
from tests.serving.fakes import KEY, OTHER_KEY, SECRET, EngineCall, Stack, running

CHAT = "/v1/chat/completions"
BODY = {"max_tokens": 8}
CASES = [
    ("requests_per_minute", Limits(requests_per_minute=2)),
    ("tokens_per_minute", Limits(tokens_per_minute=1_500)),
    ("input_tokens_per_minute", Limits(input_tokens_per_minute=1_300)),
    ("output_tokens_per_minute", Limits(output_tokens_per_minute=17)),
    ("concurrency", Limits(concurrency=2)),
    ("budget_day", Limits(budgets=(Budget("day", 700_000),))),
]
WORDS_OF = {
    "requests_per_minute": "2 requests per minute",
    "tokens_per_minute": "1500 tokens per minute",
    "input_tokens_per_minute": "1300 input tokens per minute",
    "output_tokens_per_minute": "17 output tokens per minute",
    "concurrency": "2 requests at once",
    "budget_day": "0.000700 USD per day",
}


def limit(stack: Stack, whose: str, limits: Limits) -> None:
    """Set the limits of the key, or of its whole tenant."""
    keys = dict(stack.snapshots.snapshot.keys)
    digest = apikey.digest(KEY, SECRET)
    name = "limits" if whose == "key" else "tenant_limits"
    keys[digest] = msgspec.structs.replace(keys[digest], **{name: limits})
    stack.snapshots.change(keys=keys)


def client_of(stack: Stack, key: str = KEY) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=20)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("whose", ["key", "tenant"])
@pytest.mark.parametrize(("name", "limits"), CASES, ids=[name for name, _ in CASES])
async def test_a_limit_holds_while_requests_run_and_names_itself(
    root: Path, name: str, limits: Limits, whose: str, stream: bool
) -> None:
    async def held(call: EngineCall) -> None:
        await go.wait()
        await call.say()

    go = asyncio.Event()
    async with running(root) as stack, client_of(stack) as client, client_of(stack, OTHER_KEY) as other:
        limit(stack, whose, limits)
        stack.engine.script = held
        running_ones = [asyncio.create_task(client.post(CHAT, json=chat(stream=stream, **BODY))) for _ in range(2)]
        await stack.engine.call(2)
        refused = await client.post(CHAT, json=chat(stream=stream, **BODY))
        error = refused.json()["error"]
        assert refused.status_code == 429
        assert error["code"] == ("insufficient_quota" if name == "budget_day" else "rate_limit_exceeded")
        assert f"This {whose}'s limit of {WORDS_OF[name]}" in error["message"]
        told = refused.headers
        assert ("retry-after" in told) != ("x-should-retry" in told)
        go.set()
        unhindered = await other.post(CHAT, json=chat(stream=stream, **BODY))  # another tenant has limits of its own
        assert [each.status_code for each in (*await asyncio.gather(*running_ones), unhindered)] == [200] * 3
        rejected = [entry for entry in await stack.settled() if entry.record.status == 429]
        assert len(rejected) == 1 and rejected[0].usage is not None and rejected[0].usage.cost == 0


@pytest.mark.parametrize("name", ["concurrency", "output_tokens_per_minute", "budget_day"])
async def test_what_a_request_did_not_use_is_there_again(root: Path, name: str) -> None:
    async with running(root) as stack, client_of(stack) as client:
        limit(stack, "key", dict(CASES)[name])
        for _ in range(2):  # seven tokens each of eight reserved: the second fits only because of what came back
            assert (await client.post(CHAT, json=chat(**BODY))).status_code == 200
            await stack.idle()
        assert (await client.post(CHAT, json=chat(max_tokens=2))).status_code == 200


async def test_headers_tell_the_tightest_limit_on_every_answer(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        limit(stack, "tenant", Limits(requests_per_minute=100, tokens_per_minute=1_000_000))
        limit(stack, "key", Limits(requests_per_minute=10))
        answers: list[Any] = [await client.post(CHAT, json=chat(stream=stream, **BODY)) for stream in (False, True)]
        for number, answer in enumerate(answers, 1):
            assert answer.headers["x-ratelimit-limit-requests"] == "10"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(10 - number)
            assert answer.headers["x-ratelimit-limit-tokens"] == "1000000"
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")


async def test_a_request_that_can_never_fit_is_told_not_to_come_again(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        limit(stack, "key", Limits(output_tokens_per_minute=10))
        refused = await client.post(CHAT, json=chat(max_tokens=11))
        assert refused.status_code == 429
        assert refused.headers["x-should-retry"] == "false"
        assert "ask for fewer tokens" in refused.json()["error"]["message"]
