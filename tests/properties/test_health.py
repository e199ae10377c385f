"""Breakers, outliers and the budget of retries, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import (
    BadRequest,
    ClientLeft,
    DeadlineExceeded,
    EngineRefused,
    GatewayError,
    ShuttingDown,
    TransportFault,
    Unavailable,
    UpstreamFailed,
)
from serving.health import FAULT, NEUTRAL, OK, Breaker, Health, RetryBudget, State, outcome_of
from serving.health.breaker import CONSECUTIVE, OPEN_MAX_S, OPEN_S, PROBE_S
from serving.health.budget import FLOOR, SHARE, WINDOW_S
from serving.health.outliers import Account, allowed, outliers
from serving.health.watch import EJECTED_S, MAX_REPLICAS
from serving.health.window import Window
from tests.properties.test_routing_targets import replica

START = 1000.0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, OK),
        (TransportFault("x"), FAULT),
        (UpstreamFailed("x"), FAULT),
        (ShuttingDown("x"), NEUTRAL),
        (Unavailable("x", code="x"), NEUTRAL),
        (BadRequest("x"), NEUTRAL),
        (DeadlineExceeded("x"), NEUTRAL),
        (ClientLeft(), NEUTRAL),
    ],
)
def test_only_faults_of_the_way_or_the_engine_count(error: GatewayError | None, outcome: str) -> None:
    assert outcome_of(error) == outcome
    assert issubclass(EngineRefused, GatewayError) and not issubclass(EngineRefused, UpstreamFailed)


# ---- breaker


def opened(breaker: Breaker, now: float, jitter: float = 0.0) -> str:
    told = ""
    for _ in range(CONSECUTIVE):
        assert told == ""
        told = breaker.note(FAULT, now, jitter)
    return told


def test_a_breaker_opens_probes_once_and_closes() -> None:
    breaker = Breaker()
    assert "in a row" in opened(breaker, START)
    assert breaker.verdict(START + OPEN_S - 0.01) == "breaker open"
    now = START + OPEN_S
    assert breaker.state(now) is State.HALF_OPEN and breaker.verdict(now) == ""
    breaker.begin(now)
    assert "probe" in breaker.verdict(now)
    assert breaker.note(NEUTRAL, now, 0) == "" and breaker.verdict(now) == ""
    breaker.begin(now)
    assert breaker.note(OK, now, 0) and breaker.state(now) is State.CLOSED


def test_each_failed_probe_doubles_the_time_up_to_a_bound() -> None:
    breaker, now = Breaker(), START
    opened(breaker, now)
    for n in range(1, 8):
        now += min(OPEN_S * 2 ** (n - 1), OPEN_MAX_S)
        assert breaker.verdict(now) == ""
        breaker.begin(now)
        assert breaker.note(FAULT, now, 0) == "the probe failed"
        assert breaker.verdict(now + min(OPEN_S * 2**n, OPEN_MAX_S) - 0.01) == "breaker open"


def test_an_opening_long_after_the_last_is_short_again() -> None:
    breaker = Breaker()
    opened(breaker, START)
    assert breaker.note(OK, START + OPEN_S, 0)
    later = START + 1000
    opened(breaker, later)
    assert breaker.state(later + OPEN_S) is State.HALF_OPEN


def test_one_that_flaps_is_left_alone_for_longer() -> None:
    breaker = Breaker()
    opened(breaker, START)
    breaker.note(OK, START + OPEN_S, 0)
    opened(breaker, START + OPEN_S + 1)
    assert breaker.state(START + OPEN_S + 1 + OPEN_S) is State.OPEN


def test_jitter_only_shortens_and_by_half_at_most() -> None:
    breaker = Breaker()
    opened(breaker, START, jitter=0.999)
    assert breaker.state(START + OPEN_S * 0.5) is State.OPEN
    assert breaker.state(START + OPEN_S * 0.51) is State.HALF_OPEN


def test_a_lost_probe_does_not_keep_it_shut_for_good() -> None:
    breaker = Breaker()
    opened(breaker, START)
    breaker.begin(START + OPEN_S)
    assert breaker.verdict(START + OPEN_S + PROBE_S - 0.01)
    assert breaker.verdict(START + OPEN_S + PROBE_S) == ""


def test_a_share_of_faults_opens_it_too() -> None:
    breaker, told = Breaker(), []
    for n in range(20):
        told.append(breaker.note(FAULT if n % 2 else OK, START, 0))
    assert told[:-1] == [""] * 19 and told[-1] == "10 faults in 20 attempts within 10 s"


@given(st.lists(st.tuples(st.sampled_from([OK, NEUTRAL]), st.floats(0, 5)), max_size=60))
def test_nothing_but_faults_opens_it(attempts: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), START
    for outcome, pause in attempts:
        now += pause
        breaker.begin(now)
        assert breaker.note(outcome, now, 0) == "" and breaker.verdict(now) == ""


@given(st.lists(st.tuples(st.sampled_from([OK, NEUTRAL, FAULT]), st.floats(0, 3), st.floats(0, 0.99)), max_size=80))
def test_an_open_breaker_always_lets_a_probe_through_in_the_end(attempts: list[tuple[str, float, float]]) -> None:
    breaker, now = Breaker(), START
    for outcome, pause, jitter in attempts:
        now += pause
        if not breaker.verdict(now):
            breaker.begin(now)
            breaker.note(outcome, now, jitter)
    assert breaker.verdict(now + OPEN_MAX_S + PROBE_S) == ""


# ---- retries


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=200))
def test_retries_stay_within_the_budget(events: list[tuple[bool, float]]) -> None:
    budget, now = RetryBudget(), START
    window = Window(WINDOW_S)  # requests, retries
    for retry, pause in events:
        now += pause
        budget.attempted(now)
        if retry and budget.may_retry(now):
            window.note(now, 0, 1)
        else:
            window.note(now, 1, 0)
        requests, retries = window.counts(now)
        assert retries <= max(FLOOR, SHARE * requests)


def test_a_budget_that_is_spent_comes_back() -> None:
    budget = RetryBudget()
    assert sum(budget.may_retry(START) for _ in range(50)) == FLOOR
    assert budget.may_retry(START + WINDOW_S)
    for _ in range(1000):
        budget.attempted(START + 100)
    granted = 0
    while budget.may_retry(START + 100):
        granted += 1
        budget.attempted(START + 100)
    assert granted == SHARE * 1000


# ---- outliers

accounts = st.builds(
    lambda attempts, share, latencies: Account(attempts, int(attempts * share), tuple(latencies)),
    st.integers(0, 200),
    st.floats(0, 1),
    st.lists(st.floats(0.001, 5), max_size=30),
)


@given(st.dictionaries(st.text(max_size=2), accounts, max_size=5))
def test_equals_are_no_outliers_and_one_alone_is_none(pool: dict[str, Account]) -> None:
    for account in pool.values():
        assert outliers(dict.fromkeys(["a", "b", "c"], account)) == {}
        assert outliers({"a": account}) == {}
    assert set(outliers(pool)) <= set(pool)


@pytest.mark.parametrize(
    ("odd", "word"),
    [(Account(100, 60), "faults"), (Account(100, 0, (2.0,) * 30), "median")],
)
def test_an_outlier_is_found_with_its_figures(odd: Account, word: str) -> None:
    well = Account(100, 1, (0.1,) * 30)
    found = outliers({"a": well, "b": odd, "c": well})
    assert list(found) == ["b"] and word in found["b"]


def test_half_of_a_pool_at_most() -> None:
    assert [allowed(pool) for pool in range(6)] == [0, 0, 1, 1, 2, 2]


# ---- the whole


def play(health: Health, pool: list[Any], faulty: set[str], seconds: int, start: float = START) -> list[str]:
    """Everybody who may be asked gets 10 attempts a second; faulty ones fail seven of them, never five in a row."""
    told = []
    for second in range(seconds):
        now = start + second
        for each in [each for each in pool if not health.verdict(each, now)]:
            for n in range(10):
                health.begin(each, now)
                bad = each.id in faulty and n not in (0, 4, 8)
                events = health.note(each, FAULT if bad else OK, 0.1, now, 0.0)
                told += [f"{event.what} {event.replica_id}" for event in events]
    return told


def test_an_outlier_is_ejected_for_a_while_and_never_more_than_half() -> None:
    pool = [replica(f"{n}") for n in range(4)]
    health = Health()
    told = play(health, pool, {"id-0"}, 5)
    assert "ejected id-0" in told or "opened id-0" in told
    assert health.verdict(pool[0], START + 5)
    assert all(not health.verdict(each, START + 5) for each in pool[1:])


def slow(health: Health, pool: list[Any], latencies: dict[str, float], now: float) -> list[str]:
    told = []
    for each in pool:
        health.verdict(each, now)
    for each in pool:
        for _ in range(25):
            events = health.note(each, OK, latencies[each.id], now, 0.0)
            told += [f"{event.what} {event.replica_id}" for event in events]
    return told


def test_a_slow_replica_is_ejected_returns_and_serves_again_when_it_is_the_last() -> None:
    pool, health = [replica("0"), replica("1")], Health()
    latencies = {"id-0": 3.0, "id-1": 0.1}
    slow(health, pool, latencies, START)
    assert slow(health, pool, latencies, START + 1) == ["ejected id-0"]
    assert health.verdict(pool[0], START + 2) == "ejected as an outlier"
    assert health.states(START + 2) == {"id-0": "ejected"}
    for _ in range(CONSECUTIVE):
        health.note(pool[1], FAULT, None, START + 2, 0.0)
    assert health.verdict(pool[1], START + 2) == "breaker open"
    assert health.verdict(pool[0], START + 2) == ""  # an outlier is better than nobody
    later = START + 2 + EJECTED_S
    health.note(pool[1], OK, 0.1, later, 0.0)  # the probe
    assert "returned id-0" in slow(health, pool, dict.fromkeys(latencies, 0.1), later + 2)
    assert health.verdict(pool[0], later + 3) == ""


def test_half_of_the_pool_stays_whatever_it_does() -> None:
    pool, health = [replica(f"{n}") for n in range(4)], Health()
    latencies = {"id-0": 3.0, "id-1": 3.0, "id-2": 0.1, "id-3": 0.1}
    told = [event for second in range(3) for event in slow(health, pool, latencies, START + second)]
    assert sorted(told) == ["ejected id-0", "ejected id-1"]
    latencies["id-2"] = 9.0
    told = [event for second in range(3, 20) for event in slow(health, pool, latencies, START + second)]
    assert told == []
    assert [bool(health.verdict(each, START + 20)) for each in pool] == [True, True, False, False]


def test_a_new_launch_starts_clean_and_the_old_one_cannot_spoil_it() -> None:
    old, new, health = replica("0"), replica("0", epoch=2), Health()
    for _ in range(CONSECUTIVE):
        health.note(old, FAULT, None, START, 0.0)
    assert health.verdict(old, START) == "breaker open" and health.verdict(new, START) == ""
    health.prune({new.id: new})
    assert health.states(START) == {}
    for _ in range(CONSECUTIVE):
        health.note(old, FAULT, None, START, 0.0)
    assert health.verdict(new, START) == ""


def test_it_remembers_a_bounded_number() -> None:
    health = Health()
    for n in range(MAX_REPLICAS + 10):
        health.note(replica(f"{n}", f"d{n % 3}"), FAULT, None, START, 0.0)
    assert len(health._launches) == MAX_REPLICAS == sum(len(pool) for pool in health._pools.values())
