"""Deployments that cannot answer: sleeping ones are woken and waited for, fallbacks stand in, others do not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import apikey, starting
from serving.port import Deployment, Limits, Route, Snapshot, Target
from tests.serving.conftest import chat
from tests.serving.fakes import KEY, MODEL, SECRET, Stack, replica, route, running, snapshot

CHAT = "/v1/chat/completions"
ASLEEP = Deployment(id="deployment-1", name="tiny-cpu", wakes=True, start_s=30)


def client_of(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=10)


class Woken(list[str]):
    """What the controller would hear."""

    def __init__(self, stack: Stack) -> None:
        stack.gateway._pipeline.coordinator.wake = self.append  # type: ignore[method-assign]


def put(stack: Stack, *deployments: Deployment, up: bool = False, **route_changes: Any) -> None:
    """Change what the gateway knows: these deployments, the first engine's replica up or not."""
    engines = [replica(engine.path, number) for number, engine in enumerate(stack.engines, 1)] if up else []
    stack.snapshots.change(
        replicas={each.id: each for each in engines},
        deployments={each.id: each for each in deployments},
        routes={MODEL: route(**route_changes)},
    )


async def test_a_sleeping_model_is_woken_and_says_when_to_come_back(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        woken = Woken(stack)
        put(stack, ASLEEP)
        for _ in range(5):
            response = await client.post(CHAT, json=chat())
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "model_starting"
            assert response.headers["retry-after"] == "30"
        assert woken == ["deployment-1"]  # once a second says enough
        for entry in await stack.settled():
            assert (entry.record.outcome, entry.record.code) == ("rejected", "model_starting")
            assert entry.usage is not None and entry.usage.cost == 0


async def test_one_that_starts_already_is_not_woken(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        woken = Woken(stack)
        put(stack, msgspec.structs.replace(ASLEEP, wakes=False, starting_at=time.time() - 10))
        response = await client.post(CHAT, json=chat())
        assert 18 <= int(response.headers["retry-after"]) <= 20
        assert woken == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_route_that_holds_answers_once_the_model_is_there(root: Path, stream: bool) -> None:
    async with running(root) as stack, client_of(stack) as client:
        woken = Woken(stack)
        put(stack, ASLEEP, on_stopped="hold")
        asked = asyncio.create_task(client.post(CHAT, json=chat(stream=stream)))
        while not woken:
            await asyncio.sleep(0.01)
        assert not asked.done()
        put(stack, ASLEEP, up=True, on_stopped="hold")
        response = await asked
        assert response.status_code == 200
        entry = await stack.the_settled()
        phases = {name: (start, end) for name, start, end, _ in entry.detail.phases}
        assert phases["start"][1] > phases["start"][0]
        assert entry.record.queue_us + 1 >= phases["start"][1] - phases["start"][0]
        assert entry.record.unattributed_us <= 0.05 * entry.record.duration_us


async def test_patience_ends_and_the_client_hears_when_to_come_back(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        Woken(stack)
        put(stack, ASLEEP, on_stopped="hold", hold_s=0.3)
        response = await client.post(CHAT, json=chat())
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_starting")
        entry = await stack.the_settled()
        assert entry.record.unattributed_us <= 0.1 * entry.record.duration_us


async def test_only_so_many_are_held(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        woken = Woken(stack)
        put(stack, ASLEEP, on_stopped="hold", max_held=1)
        first = asyncio.create_task(client.post(CHAT, json=chat()))
        while not woken:
            await asyncio.sleep(0.01)
        assert (await client.post(CHAT, json=chat())).status_code == 503
        put(stack, ASLEEP, up=True, on_stopped="hold", max_held=1)
        assert (await first).status_code == 200
        assert stack.gateway._pipeline.starts.held == 0


async def test_who_leaves_while_held_frees_its_place(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        woken = Woken(stack)
        put(stack, ASLEEP, on_stopped="hold")
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=chat(), timeout=0.3)
        assert woken == ["deployment-1"]
        entry = await stack.the_settled()
        assert entry.record.outcome == "cancelled"
        assert stack.gateway._pipeline.starts.held == 0


@pytest.mark.parametrize("on_stopped", ["refuse", "hold"])
async def test_who_is_over_a_limit_wakes_nothing_and_waits_for_nothing(root: Path, on_stopped: str) -> None:
    async with running(root) as stack, client_of(stack) as client:
        woken = Woken(stack)
        put(stack, ASLEEP, on_stopped=on_stopped)
        digest = apikey.digest(KEY, SECRET)
        keys = dict(stack.snapshots.snapshot.keys)
        keys[digest] = msgspec.structs.replace(keys[digest], limits=Limits(output_tokens_per_minute=1))
        stack.snapshots.change(keys=keys)
        response = await client.post(CHAT, json=chat())
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert woken == [] and stack.gateway._pipeline.starts.held == 0
        assert (await stack.the_settled()).record.outcome == "rejected"


async def test_asking_for_limits_reserves_nothing(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        Woken(stack)
        put(stack, ASLEEP)
        digest = apikey.digest(KEY, SECRET)
        keys = dict(stack.snapshots.snapshot.keys)
        keys[digest] = msgspec.structs.replace(keys[digest], limits=Limits(requests_per_minute=1, concurrency=1))
        stack.snapshots.change(keys=keys)
        for _ in range(3):
            assert (await client.post(CHAT, json=chat())).status_code == 503
        put(stack, ASLEEP, up=True)
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert (await client.post(CHAT, json=chat())).status_code == 429


async def test_a_fallback_answers_where_no_target_can(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        there = replica(stack.engine.path, deployment_id="deployment-2", deployment_name="other")
        stack.snapshots.change(replicas={there.id: there}, routes={MODEL: route(fallbacks=("deployment-2",))})
        assert (await client.post(CHAT, json=chat())).status_code == 200
        record = (await stack.the_settled()).record
        assert (record.deployment_id, record.role) == ("deployment-2", "fallback")


async def test_what_is_not_evaluated_takes_its_share_and_no_more(root: Path) -> None:
    async with running(root) as stack, client_of(stack) as client:
        targets = (Target("deployment-1", 95), Target("deployment-2", 5, stands_in=False))
        quantised = replica(stack.engine.path, deployment_id="deployment-2", deployment_name="int8")
        stack.snapshots.change(replicas={quantised.id: quantised}, routes={MODEL: route(targets=targets)})
        response = await client.post(CHAT, json=chat())
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_ready_replica")
        full = replica(stack.engine.path, 2)
        stack.snapshots.change(replicas={quantised.id: quantised, full.id: full})
        assert (await client.post(CHAT, json=chat())).status_code == 200


BETWEEN = Deployment(id="deployment-1", name="tiny-cpu", between=True, start_s=4)


async def test_one_that_is_between_two_replicas_is_waited_for_as_in_the_queue(root: Path) -> None:
    """A rollout on a full card: nobody is refused before the queue's full time."""
    async with running(root) as stack, client_of(stack) as client:
        woken = Woken(stack)
        put(stack, BETWEEN, queue_timeout_s=0.5)
        began = time.monotonic()
        response = await client.post(CHAT, json=chat())
        assert time.monotonic() - began >= 0.5
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_starting")
        assert "has no replica at the moment" in response.json()["error"]["message"]
        put(stack, BETWEEN, queue_timeout_s=30.0)
        asked = asyncio.create_task(client.post(CHAT, json=chat()))
        while not stack.gateway._pipeline.starts.held:
            await asyncio.sleep(0.01)
        put(stack, BETWEEN, up=True, queue_timeout_s=30.0)
        assert (await asked).status_code == 200
        assert woken == [], "nobody sleeps here"


def known(*deployments: Deployment) -> Snapshot:
    return msgspec.structs.replace(snapshot([]), deployments={each.id: each for each in deployments})


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.none() | st.floats(0, 1000), st.floats(1, 1000)), max_size=4)
)
def test_the_soonest_target_is_waited_for(facts: list[tuple[bool, bool, float | None, float]]) -> None:
    every = [
        Deployment(
            id=f"d{number}", name="d", wakes=wakes, between=between, start_s=s,
            starting_at=None if since is None else 1000 - since,
        )
        for number, (wakes, between, since, s) in enumerate(facts)
    ]  # fmt: skip
    to = Route(id="r", name="m", targets=tuple(Target(each.id) for each in every), created=0)
    start = starting.coming(to, known(*every), 1000.0)
    able = [each for each in every if each.wakes or each.between or each.starting_at is not None]
    assert (start is None) == (not able)
    if start is not None:
        assert start.eta_s >= 1
        assert start.deployment in able
