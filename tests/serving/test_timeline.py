"""The waterfall of a real request: covered, bounded, and each injected delay seen in its own phase only."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import pytest

from serving.port import Settled
from serving.telemetry.record import MAX_DETAIL_BYTES
from tests.serving.conftest import chat, connected
from tests.serving.fakes import ORDINARY_PHASES, EngineCall, Stack, running

CHAT = "/v1/chat/completions"
DELAY_S = 0.15
GATEWAY_PHASES = ("receive", "auth", "admission", "routing", "connect", "deliver", "settle")


async def slow(call: EngineCall) -> None:
    await call.say(gap_s=0.02)


def lengths(entry: Settled) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, start, end, _ in entry.detail.phases:
        found[name] = found.get(name, 0) + end - start
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_phases_cover_the_request(stack: Stack, client: httpx.AsyncClient, stream: bool) -> None:
    stack.engine.script = slow
    await client.post(CHAT, json=chat(stream=stream))
    entry = await stack.the_settled()
    assert entry.record.unattributed_us <= 0.05 * entry.record.duration_us
    assert list(lengths(entry)) == ORDINARY_PHASES
    times = [t for _, _, t, _ in entry.detail.events]
    assert times == sorted(times)
    assert {who for who, *_ in entry.detail.events} == {"gateway", "engine"}


@pytest.mark.parametrize("phase", GATEWAY_PHASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_delay_is_seen_in_its_own_phase_and_no_other(root: Path, phase: str, stream: bool) -> None:
    async with running(root, fault_delays={phase: DELAY_S}) as stack, connected(stack) as client:
        await client.post(CHAT, json=chat(stream=stream))
        entry = await stack.the_settled()
        assert lengths(entry)[phase] >= DELAY_S * 1e6
        # no two phases share a moment, so what this one has no other has; how long those took is the machine's
        spans = sorted((start, end) for _, start, end, _ in entry.detail.phases)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), entry.detail.phases


async def test_a_detail_stays_small_and_says_what_it_left_out(stack: Stack, client: httpx.AsyncClient) -> None:
    async def talkative(call: EngineCall) -> None:
        for step in range(300):
            call.note("PREEMPTED", step=step)
        await call.say([f"w{number}" for number in range(4000)])

    stack.engine.script = talkative
    await client.post(CHAT, json=chat(stream=True))
    entry = await stack.the_settled()
    assert len(msgspec.msgpack.encode(entry.detail)) <= MAX_DETAIL_BYTES
    assert len(entry.detail.gaps) + entry.detail.gaps_dropped == 3999
    assert entry.usage is not None and entry.usage.completion_tokens == 4000


async def test_gaps_alone_are_cut_to_fit(stack: Stack, client: httpx.AsyncClient) -> None:
    async def talkative(call: EngineCall) -> None:
        await call.say([f"w{number}" for number in range(4000)])

    stack.engine.script = talkative
    await client.post(CHAT, json=chat(stream=True))
    detail = (await stack.the_settled()).detail
    assert len(msgspec.msgpack.encode(detail)) <= MAX_DETAIL_BYTES
    assert len(detail.gaps) > 500


async def test_an_unreadable_timeline_costs_nothing(stack: Stack, client: httpx.AsyncClient) -> None:
    async def odd(call: EngineCall) -> None:
        await call.head()
        await call.token("x", fanlight={"events": "none"})
        await call.finish()

    stack.engine.script = odd
    assert (await client.post(CHAT, json=chat())).status_code == 200
    assert (await stack.the_settled()).detail.clock == ""


async def test_an_engine_that_tells_durations_gets_its_phases(stack: Stack, client: httpx.AsyncClient) -> None:
    async def as_vllm_does(call: EngineCall) -> None:
        await call.head()
        await asyncio.sleep(0.05)
        for word in ("a", "b", "c"):
            await call.token(word)
        told = {"queue_time_ms": 10.0, "time_to_first_token_ms": 30.0, "generation_time_ms": 1.5, "mean_itl_ms": 0.7}
        await call.event(call.chunk(call.choice(None, finish="stop")))
        await call.event(call.chunk(metrics=told))
        await call.event(b"[DONE]")
        await call.end()

    stack.engine.script = as_vllm_does
    assert (await client.post(CHAT, json=chat(stream=True))).status_code == 200
    entry = await stack.the_settled()
    found = lengths(entry)
    assert entry.detail.clock == "durations"
    assert (entry.record.engine_queue_us, entry.record.prefill_us) == (10_000, 30_000)
    assert found["decode"] == 1500
    assert entry.record.unattributed_us <= 0.05 * entry.record.duration_us


@pytest.mark.parametrize("metrics", [[], "x", {"queue_time_ms": "soon"}, {"time_to_first_token_ms": 9e12}, None])
async def test_durations_that_cannot_be_used_cost_nothing(
    stack: Stack, client: httpx.AsyncClient, metrics: object
) -> None:
    async def odd(call: EngineCall) -> None:
        await call.head()
        await call.token("x", metrics=metrics)
        await call.finish()

    stack.engine.script = odd
    assert (await client.post(CHAT, json=chat())).status_code == 200
