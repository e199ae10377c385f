"""A canary is rolled back for what it does, not for how often one looks."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.canary import CONTINUE, PASS, ROLLBACK, Observed, Rules, judge, observed
from serving.port import Objectives

PEEK = 20
PROMISE = Objectives(availability=0.99)
EVERYTHING = Objectives(availability=0.99, ttft_p99_ms=500.0, itl_p99_ms=80.0)


def first_verdict(
    stable: float, canary: float, *, source: random.Random, looks: int, share: int = 1, objectives: Objectives = PROMISE
) -> tuple[str, int]:
    """Look after every 20 requests of the canary, each beside `share` of stable: the first end and when it came."""
    bad = [[0, 0, 0], [0, 0, 0]]
    for look in range(1, looks + 1):
        for counts, rate, size in ((bad[0], stable, PEEK * share), (bad[1], canary, PEEK)):
            for promise in range(3):
                counts[promise] += sum(source.random() < rate for _ in range(size))
        arms = [
            Observed(errors=(size, counts[0]), ttft=(size, counts[1]), itl=(size, counts[2]))
            for counts, size in zip(bad, (look * PEEK * share, look * PEEK), strict=True)
        ]
        verdict = judge(*arms, objectives)
        if verdict.action == ROLLBACK:
            return ROLLBACK, look * PEEK
    return CONTINUE, looks * PEEK


@pytest.mark.parametrize(
    ("stable", "canary", "objectives"),
    [
        (0.01, 0.01, PROMISE),  # just as promised
        (0.05, 0.05, PROMISE),  # both worse than promised, and alike
        (0.30, 0.30, Objectives(availability=0.999)),
        (0.001, 0.01, PROMISE),  # worse than stable, and as promised
        (0.02, 0.02, EVERYTHING),  # three promises share one alpha
    ],
)
def test_a_canary_that_is_as_good_is_hardly_ever_rolled_back(
    stable: float, canary: float, objectives: Objectives
) -> None:
    runs, source = 300, random.Random(11)
    back = sum(
        first_verdict(stable, canary, source=source, looks=40, objectives=objectives)[0] == ROLLBACK
        for _ in range(runs)
    )
    alpha = Rules().alpha
    # at alpha itself, more than this has a probability of a millionth
    assert back <= runs * alpha + 5 * math.sqrt(runs * alpha)


@pytest.mark.parametrize(("stable", "canary", "share", "within"), [(0.01, 0.05, 9, 700), (0.01, 0.05, 1, 1400)])
def test_five_times_the_errors_are_found_within_hundreds(stable: float, canary: float, share: int, within: int) -> None:
    source = random.Random(5)
    ends = [first_verdict(stable, canary, source=source, looks=within // PEEK, share=share) for _ in range(40)]
    assert sorted(when for _, when in ends)[20] <= within * 0.6
    assert sum(end == ROLLBACK for end, _ in ends) >= 36


def test_a_canary_that_always_fails_is_found_within_one_look() -> None:
    verdict = judge(Observed(errors=(180, 1)), Observed(errors=(20, 20)), PROMISE)
    assert verdict.action == ROLLBACK
    assert "20 of 20" in verdict.reason and "100.00%" in verdict.reason


counts = st.integers(0, 3000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
arms = st.builds(Observed, errors=counts, ttft=counts, itl=counts)


@given(arms, arms)
def test_every_verdict_has_a_reason_and_finite_figures(stable: Observed, canary: Observed) -> None:
    verdict = judge(stable, canary, EVERYTHING)
    assert verdict.reason and len(verdict.measures) == 3
    for each in verdict.measures:
        assert each.worse < math.inf and each.fine < math.inf and not math.isnan(each.worse + each.fine)
    better = [each for each in verdict.measures if each.canary[1] * each.stable[0] <= each.stable[1] * each.canary[0]]
    assert all(each.worse <= 0 for each in better if each.stable[0])  # no evidence against one that does better


@given(st.integers(50, 1000), st.integers(0, 30), st.integers(1, 30))
def test_more_failures_are_more_evidence(count: int, bad: int, more: int) -> None:
    stable = Observed(errors=(10_000, 100))
    evidence = [
        judge(stable, Observed(errors=(count, min(each, count))), PROMISE).measures[0].worse
        for each in accumulate([bad + 20, more])
    ]
    if min(bad + 20, count) / count > 0.01:  # below what is allowed there is no evidence at all
        assert evidence[0] <= evidence[1] + 1e-9


def test_a_canary_that_does_well_passes_in_the_end_and_one_that_does_not_never() -> None:
    assert judge(Observed(errors=(20_000, 100)), Observed(errors=(2000, 10)), PROMISE).action == PASS
    assert judge(Observed(errors=(20_000, 100)), Observed(errors=(50, 0)), PROMISE).action == CONTINUE
    slow = Observed(errors=(2000, 10), ttft=(2000, 200))
    fast = Observed(errors=(20_000, 100), ttft=(20_000, 100))
    verdict = judge(fast, slow, Objectives(availability=0.99, ttft_p99_ms=500.0))
    assert verdict.action == ROLLBACK and verdict.reason.startswith("ttft")


def test_nothing_is_decided_without_a_stable_target_to_compare_with() -> None:
    assert judge(Observed(), Observed(errors=(500, 250)), PROMISE).action == CONTINUE


def test_requests_are_counted_against_what_is_promised() -> None:
    requests = [(False, 100.0, 20.0), (True, None, None), (False, 600.0, 90.0), (False, 500.0, None)]
    assert observed(requests, EVERYTHING) == Observed(errors=(4, 1), ttft=(3, 1), itl=(2, 1))
    assert observed(requests, PROMISE) == Observed(errors=(4, 1))
