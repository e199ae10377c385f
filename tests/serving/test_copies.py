"""Second copies: for a late first token (hedges) and for a canary that serves nobody yet (shadows)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from serving.port import Route, Target
from tests.serving.conftest import chat, events, text_of
from tests.serving.fakes import KEY, WORDS, EngineCall, Stack, replica, route, running, well

CHAT = "/v1/chat/completions"


async def silent(call: EngineCall) -> None:
    """Accepts, and says nothing until it is hung up on."""
    await call.head()
    await call.until_closed()


def client_of(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=10)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_late_first_token_is_overtaken_by_a_second_copy(root: Path, stream: bool) -> None:
    async with running(root, engines=2, route_changes={"hedge_after_s": 0.05}) as stack, client_of(stack) as client:
        stack.engines[0].script = silent
        for _ in range(2):  # whichever turn it is, one of them is sent to the silent engine first
            response = await client.post(CHAT, json=chat(stream=stream))
            assert response.status_code == 200
            text = text_of(events(response.text)) if stream else response.json()["choices"][0]["message"]["content"]
            assert text == "".join(WORDS)
        entries = await stack.settled()
        assert sorted(entry.record.attempts for entry in entries) == [1, 2]
        for entry in entries:
            assert entry.record.replica_id == "replica-2"
            assert entry.usage is not None and entry.usage.completion_tokens == len(WORDS)
        (late,) = stack.engines[0].calls
        await asyncio.wait_for(late.closed.wait(), 5)


async def test_a_hedge_that_fails_leaves_the_first_its_time(root: Path) -> None:
    async def slow(call: EngineCall) -> None:
        await asyncio.wait_for(overtaken.wait(), 5)
        await call.say()

    async def broken(call: EngineCall) -> None:
        call.die()
        overtaken.set()

    overtaken = asyncio.Event()
    async with running(root, engines=2, route_changes={"hedge_after_s": 0.05}) as stack, client_of(stack) as client:
        stack.engines[0].script, stack.engines[1].script = slow, broken
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 200
        assert (await stack.the_settled()).record.replica_id == "replica-1"


def with_shadow(stack: Stack, weight: int) -> None:
    """The second engine becomes a deployment of its own that gets copies."""
    first, second = stack.snapshots.snapshot.replicas.values()
    shadowed: Route = route(targets=(Target("deployment-1"), Target("deployment-2", weight, "shadow")))
    other = replica(Path(second.uds or ""), 2, deployment_id="deployment-2", deployment_name="canary")
    stack.snapshots.change(routes={shadowed.name: shadowed}, replicas={first.id: first, other.id: other})


async def test_a_shadow_gets_a_copy_that_is_recorded_and_not_billed(root: Path) -> None:
    async with running(root, engines=2) as stack, client_of(stack) as client:
        with_shadow(stack, 100)
        response = await client.post(CHAT, json=chat(stream=True))
        assert text_of(events(response.text)) == "".join(WORDS)
        copy = await stack.engines[1].call()
        assert copy.body["messages"] == stack.engines[0].calls[0].body["messages"]
        async with asyncio.timeout(5):
            while len(entries := await stack.settled()) < 2:
                await asyncio.sleep(0.01)
        billed = [entry for entry in entries if entry.usage is not None]
        shadows = [entry for entry in entries if entry.usage is None]
        assert [entry.record.role for entry in billed] == ["stable"]
        assert [entry.record.role for entry in shadows] == ["shadow"]
        assert shadows[0].record.outcome == "ok" and shadows[0].record.cost == 0
        assert shadows[0].record.id != billed[0].record.id


@pytest.mark.parametrize("fault", [silent, well])
async def test_a_shadow_without_a_share_or_with_a_fault_is_not_felt(root: Path, fault: object) -> None:
    async with running(root, engines=2) as stack, client_of(stack) as client:
        with_shadow(stack, 100 if fault is silent else 0)
        stack.engines[1].script = fault  # type: ignore[assignment]
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 200
        if fault is well:
            assert not stack.engines[1].calls
