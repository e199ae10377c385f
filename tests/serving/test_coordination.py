"""Two coordinators on one Valkey: limits hold together, slots and money come back, and Valkey may go away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from serving.coordination import shared, wire
from serving.coordination import valkey as valkey_connection
from serving.coordination.calendar import Calendar
from serving.coordination.contract import Claim, Granted, QueueTimeout, Refused, Scope, Slots, Used, Waiting
from serving.coordination.coordinator import LocalCoordinator
from serving.coordination.readings import correct, read
from serving.coordination.shared import SharedCoordinator, make
from serving.coordination.valkey import Away
from serving.port import NO_LIMITS, Budget, Limits
from tests.private_valkey import PrivateValkey, running

ids = (f"q{number}" for number in itertools.count())
USED = Used(10, 10, 1000)


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateValkey]:
    with running() as valkey:
        yield valkey


@pytest.fixture
def valkey(server: PrivateValkey) -> Iterator[PrivateValkey]:
    """Running and empty, whatever a test before did to it."""
    with server.client() as client:
        client.flushall()
    yield server
    server.stop()
    server.start()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with too much to do is no absence of Valkey: what is counted here is not to depend on its pace."""
    monkeypatch.setattr(valkey_connection, "SILENCE_S", 60.0)


@contextlib.asynccontextmanager
async def coordinators(valkey: PrivateValkey, count: int = 2) -> AsyncIterator[list[SharedCoordinator]]:
    found = [SharedCoordinator(valkey.url, f"g{number}") for number in range(count)]
    try:
        for coordinator in found:
            await coordinator.start()
            assert not coordinator.alone
        yield found
    finally:
        for coordinator in found:
            await coordinator.stop()


def claim(limits: Limits | None = None, **changes: Any) -> Claim:
    """A request of key k1 and tenant t1 that may run on replica r1 with 4 slots."""
    given: dict[str, Any] = {
        "id": next(ids),
        "scopes": (Scope("key", "k1", limits), Scope("tenant", "t1", limits)) if limits else (),
        "currency": "USD",
        "zone": "Asia/Shanghai",
        "input_tokens": 50,
        "output_tokens": 50,
        "cost": 10_000,
        "pool": "d1",
        "candidates": (Slots("r1", 4),),
        "tenant_id": "t1",
    }
    return Claim(**given | changes)


WIDE = (Slots("r1", 0),)


async def until(condition: Any) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def budget_names(limits: Limits) -> list[str]:
    """Of key k1, now."""
    found = wire.budgets(Scope("key", "k1", limits), "USD", "Asia/Shanghai", Calendar(), time.time())
    return [name for name, *_ in found]


async def held(
    valkey: PrivateValkey, limits: Limits = NO_LIMITS
) -> tuple[int, dict[str, int], dict[str, int], set[int]]:
    """Concurrency of key k1, slots in use, requests waiting, and money reserved over its budgets."""
    names = budget_names(limits)
    seen = await read(valkey.url, [("key", "k1")], names)
    return seen.scopes[0].concurrency, seen.slots, seen.waiting, {budget.reserved for budget in seen.budgets}


async def until_async(seen: Any, wanted: Any) -> None:
    """Wait until what Valkey tells is as wanted."""
    async with asyncio.timeout(20):
        while (found := await seen()) != wanted:
            await asyncio.sleep(0.02)
    assert found == wanted


async def abandon(coordinator: SharedCoordinator) -> None:
    """End a coordinator as a kill would: nothing more is said."""
    for task in (coordinator._beats, coordinator._keeper):
        assert task is not None
        task.cancel()
    link, coordinator._link = coordinator._link, None
    assert link is not None
    link.close()


LIMITS = {
    "requests_per_minute": (Limits(requests_per_minute=40), 40),
    "tokens_per_minute": (Limits(tokens_per_minute=4_050), 40),
    "input_tokens_per_minute": (Limits(input_tokens_per_minute=2_000), 40),
    "output_tokens_per_minute": (Limits(output_tokens_per_minute=2_049), 40),
    "concurrency": (Limits(concurrency=40), 40),
    "budget_day": (Limits(budgets=(Budget("day", 400_001),)), 40),
    "budget_total": (Limits(budgets=(Budget("hour", 10**12), Budget("total", 400_000))), 40),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_500_at_once_never_exceed_a_limit(valkey: PrivateValkey, name: str) -> None:
    limits, fits = LIMITS[name]
    async with coordinators(valkey) as both:
        claims = [claim(limits, candidates=WIDE) for _ in range(500)]
        answers = await asyncio.gather(*(both[n % 2].admit(each) for n, each in enumerate(claims)))
        assert sum(isinstance(answer, Granted) for answer in answers) == fits
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert {(answer.reason, answer.limit, answer.scope) for answer in refused} == {("limit", name, "key")}
        assert all(1 <= answer.retry_after_s <= 60 for answer in refused)
        for n, each in enumerate(claims):
            both[n % 2].settle(each.id, USED)
            both[n % 2].settle(each.id, USED)
    assert (await held(valkey, limits))[:3] == (0, {}, {})
    assert (await held(valkey, limits))[3] <= {0}


async def test_spent_is_what_was_used_and_can_be_corrected(valkey: PrivateValkey) -> None:
    limits = Limits(budgets=(Budget("month", 10**9),))
    async with coordinators(valkey, 1) as (coordinator,):
        for _ in range(3):
            await coordinator.admit(asked := claim(limits))
            coordinator.settle(asked.id, USED)
        await coordinator.admit(claim(limits))
        (name,) = budget_names(limits)
        seen = await read(valkey.url, [], [name])
        assert (seen.budgets[0].reserved, seen.budgets[0].spent) == (10_000, 3_000)
        assert not await correct(valkey.url, name, read=2_999, right=5)
        assert await correct(valkey.url, name, read=3_000, right=2**60)
        assert (await read(valkey.url, [], [name])).budgets[0].spent == 2**60


async def test_headers_tell_the_tightest_limit(valkey: PrivateValkey) -> None:
    scopes = (
        Scope("key", "k1", Limits(requests_per_minute=3, tokens_per_minute=10_000)),
        Scope("tenant", "t1", Limits(requests_per_minute=100, tokens_per_minute=500)),
    )
    async with coordinators(valkey, 1) as (coordinator,):
        answer = await coordinator.admit(claim(scopes=scopes))
        assert isinstance(answer, Granted) and answer.requests and answer.tokens
        assert (answer.requests.limit, answer.requests.remaining) == (3, 2)
        assert (answer.tokens.limit, answer.tokens.remaining) == (500, 400)
        assert 59 < answer.requests.reset_s <= 61


async def test_slots_are_never_exceeded_and_everybody_gets_a_turn(valkey: PrivateValkey) -> None:
    async with coordinators(valkey) as both:
        running, most, done = 0, 0, 0

        async def request(coordinator: SharedCoordinator) -> None:
            nonlocal running, most, done
            asked = claim()
            answer = await coordinator.admit(asked)
            if isinstance(answer, Waiting):
                answer = await coordinator.granted(asked.id, 20)
            assert isinstance(answer, Granted)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            done += 1
            coordinator.settle(asked.id, USED)

        await asyncio.gather(*(request(both[n % 2]) for n in range(400)))
        assert (most, done) == (4, 400)
    assert (await held(valkey))[1:3] == ({}, {})


async def test_a_retry_after_a_timeout_takes_the_earlier_place(
    valkey: PrivateValkey,
) -> None:
    async with coordinators(valkey, 1) as (coordinator,):
        await coordinator.admit(first := claim(candidates=(Slots("r1", 1),)))
        early = claim(candidates=(Slots("r1", 1),), fingerprint="call")
        assert isinstance(await coordinator.admit(early), Waiting)
        with pytest.raises(QueueTimeout) as refused:
            await coordinator.granted(early.id, 0.01)
        assert 1 <= refused.value.retry_after_s <= 60
        later = claim(candidates=(Slots("r1", 1),))
        assert isinstance(await coordinator.admit(later), Waiting)
        again = claim(candidates=(Slots("r1", 1),), fingerprint="call")
        answer = await coordinator.admit(again)
        assert isinstance(answer, Waiting) and (answer.position, answer.depth, answer.retries) == (1, 2, 1)
        coordinator.settle(first.id, USED)
        assert (await coordinator.granted(again.id, 20)).replica_id == "r1"
        assert coordinator.place(again.id) is None


async def test_leaving_frees_the_place_and_moving_goes_ahead(valkey: PrivateValkey) -> None:
    one = (Slots("r1", 1),)
    async with coordinators(valkey, 1) as (coordinator,):
        await coordinator.admit(first := claim(candidates=one))
        await coordinator.admit(leaver := claim(candidates=one, max_queued=1))
        full = await coordinator.admit(claim(candidates=one, max_queued=1))
        assert isinstance(full, Refused) and (full.reason, full.depth) == ("queue_full", 1)
        coordinator.settle(leaver.id, None)
        assert isinstance(await coordinator.admit(waiting := claim(candidates=one, max_queued=1)), Waiting)
        moved = await coordinator.move(first.id, "d1", one, least=True)
        assert isinstance(moved, Granted), "before the one who waits"
        coordinator.settle(first.id, USED)
        assert (await coordinator.granted(waiting.id, 20)).replica_id == "r1"


async def test_more_slots_than_any_replica_has_are_as_many_as_one_has(valkey: PrivateValkey) -> None:
    async with coordinators(valkey, 1) as (coordinator,):
        assert isinstance(await coordinator.admit(claim(slots=9)), Granted)
        assert (await held(valkey))[1] == {"r1": 4}


async def test_a_killed_process_returns_everything(valkey: PrivateValkey) -> None:
    limits = Limits(concurrency=10, budgets=(Budget("total", 10**9),))
    async with coordinators(valkey, 1) as (alive,):
        dead = SharedCoordinator(valkey.url, "dead")
        await dead.start()
        for _ in range(6):  # four run, two wait
            await dead.admit(claim(limits))
        await alive.admit(waiting := claim())
        assert (await held(valkey, limits)) == (6, {"r1": 4}, {"d1": 3}, {60_000})
        await abandon(dead)
        assert (await alive.granted(waiting.id, 20)).replica_id == "r1"
        assert (await held(valkey, limits)) == (0, {"r1": 1}, {}, {0})


async def test_a_forgotten_process_puts_back_what_it_holds(valkey: PrivateValkey) -> None:
    async with coordinators(valkey, 1) as (coordinator,):
        await coordinator.admit(claim(Limits(concurrency=5)))
        with valkey.client() as client:
            client.flushall()
        await until(lambda: not coordinator.alone and coordinator.processes == 1)
        await until_async(lambda: held(valkey), (1, {"r1": 1}, {}, set()))


async def test_a_cancelled_admit_leaves_nothing(valkey: PrivateValkey) -> None:
    limits = Limits(requests_per_minute=100, concurrency=100, budgets=(Budget("total", 10**9),))
    async with coordinators(valkey, 1) as (coordinator,):
        for ticks in range(6):
            tasks = [asyncio.ensure_future(coordinator.admit(claim(limits))) for _ in range(8)]
            for _ in range(ticks):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                if not task.cancelled():
                    pytest.fail("an answer came within a few ticks")
        await until_async(lambda: held(valkey, limits), (0, {}, {}, {0}))
        assert (await read(valkey.url, [("key", "k1")])).scopes[0].requests == 0


async def test_valkey_killed_and_started_again(valkey: PrivateValkey) -> None:
    """Requests live through it: those from before, those admitted meanwhile, and those that wait."""
    limits = Limits(requests_per_minute=1000, concurrency=100, budgets=(Budget("total", 10**9),))
    async with coordinators(valkey) as both:
        before = [claim(limits) for _ in range(6)]  # three run on each side, with two more waiting
        for n, each in enumerate(before):
            await both[n % 2].admit(each)
        valkey.kill()
        await until(lambda: all(coordinator.alone for coordinator in both))
        both[0].settle(before[0].id, USED)
        both[1].settle(before[1].id, USED)
        meanwhile = claim(limits, candidates=(Slots("r9", 4),), pool="d9")
        assert isinstance(await both[0].admit(meanwhile), Granted)
        short = claim(limits, candidates=(Slots("r9", 4),), pool="d9")
        assert isinstance(await both[1].admit(short), Granted)
        both[1].settle(short.id, USED)
        valkey.start()
        await until(lambda: not any(coordinator.alone for coordinator in both))
        for n in (4, 5):
            assert (await both[n % 2].granted(before[n].id, 20)).replica_id == "r1"
        await until_async(lambda: held(valkey, limits), (5, {"r1": 4, "r9": 1}, {}, {50_000}))
        for n, each in enumerate(before[2:]):
            both[n % 2].settle(each.id, USED)
        both[0].settle(meanwhile.id, USED)
        await until_async(lambda: held(valkey, limits), (0, {}, {}, {0}))
        spent = (await read(valkey.url, [], budget_names(limits))).budgets[0].spent
        assert spent == 8 * USED.cost, "each once: six from before, and both admitted alone"


async def test_a_hung_valkey_stalls_nobody(valkey: PrivateValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_connection, "SILENCE_S", 0.25)
    async with coordinators(valkey) as both:
        await until(lambda: all(coordinator.processes == 2 for coordinator in both))
        valkey.hang()
        limits = Limits(requests_per_minute=10)
        loop = asyncio.get_running_loop()
        began = loop.time()
        answers = await asyncio.gather(*(both[0].admit(claim(limits, candidates=WIDE)) for _ in range(20)))
        assert loop.time() - began < 5, "answered, and not when Valkey is back"
        assert both[0].alone and sum(isinstance(answer, Granted) for answer in answers) == 5, "half of the limit"
        valkey.wake()
        await until(lambda: not both[0].alone)
        # What it had been asked before it hung counts no more: only what was let in alone is put back.
        await until_async(lambda: held(valkey), (5, {"r1": 5}, {}, set()))


async def test_who_is_back_first_leaves_the_others_what_they_took_meanwhile(
    valkey: PrivateValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second may hold its share, of which Valkey knows nothing before it is back too."""
    monkeypatch.setattr(valkey_connection, "SILENCE_S", 0.25)
    late = asyncio.Event()

    async def connect_late(*args: Any) -> Any:
        if "g1-" in args[2]:
            await late.wait()
        return await valkey_connection.connect(*args)

    async with coordinators(valkey) as both:
        await until(lambda: all(each.processes == 2 for each in both))
        monkeypatch.setattr(shared, "connect", connect_late)
        valkey.hang()
        elsewhere = (Slots("r9", 0),)  # asked only to find Valkey away
        await asyncio.gather(*(each.admit(claim(pool="d9", candidates=elsewhere)) for each in both))
        assert all(each.alone for each in both)
        taken = [claim() for _ in range(2)]
        assert all([isinstance(await both[1].admit(each), Granted) for each in taken])
        valkey.wake()
        await until(lambda: not both[0].alone)
        assert both[1].alone
        asked = [claim() for _ in range(4)]
        answers = [await both[0].admit(each) for each in asked]
        assert [isinstance(answer, Granted) for answer in answers] == [True, True, False, False]
        late.set()
        await until(lambda: not both[1].alone)
        for before, after in zip(
            (taken[0], taken[1], asked[0], asked[1]), (None, None, asked[2], asked[3]), strict=True
        ):
            (both[1] if before in taken else both[0]).settle(before.id, USED)
            if after is not None:
                assert (await both[0].granted(after.id, 20)).replica_id == "r1"


async def test_a_process_on_its_own_needs_no_valkey() -> None:
    coordinator = make(None, "only")
    assert isinstance(coordinator, LocalCoordinator)
    await coordinator.start()
    asked = [claim(Limits(concurrency=6)) for _ in range(7)]
    answers = [await coordinator.admit(each) for each in asked]
    assert [type(answer) for answer in answers] == [Granted] * 4 + [Waiting] * 2 + [Refused]
    assert not coordinator.alone and coordinator.in_use("r1") == 4 and coordinator.waiting("d1") == 2
    coordinator.settle(asked[0].id, USED)
    assert (await coordinator.granted(asked[4].id, 20)).replica_id == "r1"
    await coordinator.stop()


async def test_a_valkey_that_is_not_there_is_no_reason_not_to_start() -> None:
    coordinator = SharedCoordinator("redis://user:secret-word@127.0.0.1:1/0", "g0")
    await coordinator.start()
    assert coordinator.alone
    assert isinstance(await coordinator.admit(claim()), Granted)
    await coordinator.stop()


async def test_passwords_stay_out_of_logs_and_errors(valkey: PrivateValkey, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Away) as refused:
        await read("redis://user:secret-word@127.0.0.1:1/0", [])
    coordinator = SharedCoordinator(f"unix://user:secret-word@{valkey.socket}", "g0")
    await coordinator.start()
    assert coordinator.alone, "Valkey knows no such user"
    await coordinator.stop()
    assert "away" in caplog.text or "cannot be used" in caplog.text
    assert "secret-word" not in caplog.text + str(refused.value)


async def test_the_library_is_loaded_again_when_it_is_gone(valkey: PrivateValkey) -> None:
    async with coordinators(valkey, 1) as (coordinator,):
        with valkey.client() as client:
            client.function_flush()
        assert isinstance(await coordinator.admit(claim()), Granted), "by itself"
        await until(lambda: not coordinator.alone)
        await until_async(lambda: held(valkey), (0, {"r1": 1}, {}, set()))


async def test_a_grant_whose_message_was_lost_is_found_by_the_heartbeat(valkey: PrivateValkey) -> None:
    async with coordinators(valkey, 1) as (coordinator,):
        await coordinator.admit(first := claim(candidates=(Slots("r1", 1),)))
        await coordinator.admit(waiting := claim(candidates=(Slots("r1", 1),)))
        coordinator._link._on_message = lambda _: None  # type: ignore[union-attr]
        coordinator.settle(first.id, USED)
        assert (await coordinator.granted(waiting.id, 20)).replica_id == "r1"


async def test_what_sleeps_is_woken_through_valkey(valkey: PrivateValkey) -> None:
    async with coordinators(valkey, 1) as (coordinator,):
        coordinator.wake("d1")
        with valkey.client() as client:
            for _ in range(100):
                if client.exists("fl:wake:d1"):
                    break
                await asyncio.sleep(0.02)
            assert abs(float(client.get("fl:wake:d1")) - time.time()) < 60
            assert 0 < client.ttl("fl:wake:d1") <= 60


async def test_a_question_about_limits_alone_reserves_nothing(valkey: PrivateValkey) -> None:
    async with coordinators(valkey, 1) as (coordinator,):
        one = Limits(concurrency=1, requests_per_minute=1)
        for _ in range(3):
            answer = await coordinator.admit(claim(one, candidates=(), max_queued=0))
            assert isinstance(answer, Refused) and answer.reason == "queue_full"
        assert isinstance(await coordinator.admit(claim(one)), Granted)
        answer = await coordinator.admit(claim(one, candidates=(), max_queued=0))
        assert isinstance(answer, Refused) and answer.reason == "limit"
