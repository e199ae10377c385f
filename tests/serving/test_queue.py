"""Waiting for a slot: in order, within its time, and leaving at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from serving.journal import Opened
from tests.serving.conftest import chat
from tests.serving.fakes import KEY, EngineCall, Stack, running

CHAT = "/v1/chat/completions"


def client_of(stack: Stack) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=20, limits=limits)


class Gate:
    """An engine script that answers when it is told to, and knows how many it holds."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.held = 0
        self.most = 0

    async def __call__(self, call: EngineCall) -> None:
        self.held += 1
        self.most = max(self.most, self.held)
        try:
            await self.open.wait()
            await call.say()
        finally:
            self.held -= 1


async def waiting(stack: Stack, count: int) -> None:
    """Until so many wait."""
    pipeline = stack.gateway._pipeline
    assert pipeline is not None
    async with asyncio.timeout(5):
        while pipeline.coordinator.waiting("deployment-1") != count:
            await asyncio.sleep(0.005)


async def test_an_engine_never_has_more_than_its_slots_and_all_are_served(root: Path) -> None:
    async with running(root, replica_changes={"max_num_seqs": 2}) as stack, client_of(stack) as client:
        gate = stack.engine.script = Gate()
        asked = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(8)]
        await waiting(stack, 6)
        await stack.engine.call(2)
        gate.open.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 8
        assert gate.most == 2
        entries = await stack.settled()
        queued = [entry for entry in entries if entry.record.queue_us]
        assert len(queued) == 6
        assert all(phase[0] != "queue" or phase[2] > phase[1] for entry in queued for phase in entry.detail.phases)


async def test_a_turn_that_does_not_come_is_503_with_the_time_to_come_back(root: Path) -> None:
    changes = {"queue_timeout_s": 0.1}
    async with (
        running(root, replica_changes={"max_num_seqs": 1}, route_changes=changes) as stack,
        client_of(stack) as client,
    ):
        gate = stack.engine.script = Gate()
        first = asyncio.create_task(client.post(CHAT, json=chat()))
        await stack.engine.call()
        refused = await client.post(CHAT, json=chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        gate.open.set()
        assert (await first).status_code == 200
        late = next(e for e in await stack.settled() if e.record.outcome == "rejected")
        assert late.record.queue_us > 0 and late.record.attempts == 0
        assert late.usage is not None and late.usage.prompt_tokens == late.usage.cost == 0


async def test_a_full_queue_refuses_at_once(root: Path) -> None:
    async with (
        running(root, replica_changes={"max_num_seqs": 1}, route_changes={"max_queued": 1}) as stack,
        client_of(stack) as client,
    ):
        gate = stack.engine.script = Gate()
        asked = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(2)]
        await waiting(stack, 1)
        refused = await client.post(CHAT, json=chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        gate.open.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]


async def test_who_leaves_while_waiting_frees_the_place_at_once(root: Path) -> None:
    async with running(root, replica_changes={"max_num_seqs": 1}) as stack, client_of(stack) as client:
        gate = stack.engine.script = Gate()
        first = asyncio.create_task(client.post(CHAT, json=chat()))
        await stack.engine.call()
        leaving = asyncio.create_task(client.post(CHAT, json=chat()))
        await waiting(stack, 1)
        leaving.cancel()
        await waiting(stack, 0)
        gate.open.set()
        assert (await first).status_code == 200
        assert sorted(entry.record.outcome for entry in await stack.settled()) == ["cancelled", "ok"]
        assert len(stack.engine.calls) == 1


async def test_who_waits_is_in_the_journal_already(root: Path) -> None:
    async with running(root, replica_changes={"max_num_seqs": 1}) as stack, client_of(stack) as client:
        gate = stack.engine.script = Gate()
        asked = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(2)]
        await waiting(stack, 1)
        opened = [entry for entry in stack.entries() if isinstance(entry, Opened)]
        assert [entry.replica_id for entry in opened] == ["replica-1", None]
        gate.open.set()
        await asyncio.gather(*asked)
        opened = [entry for entry in stack.entries() if isinstance(entry, Opened)]
        assert [entry.replica_id for entry in opened] == ["replica-1", None, "replica-1"]
