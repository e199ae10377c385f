"""What the autoscaler decides, and what it says."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from bench import autoscaler as bench
from console.fleet.autoscaler import Fleet, Policy, Sample, decide, woken
from console.fleet.models import ScaleDecision
from console.fleet.schedules import Schedule, schedules_of

Kind = ScaleDecision.Verdict
NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC).timestamp()  # a Monday
POLICY = Policy(least=1, most=4)


def minutes(*values: float | None, asked: float = 1.0, until: float = NOW) -> list[Sample]:
    """One sample a minute, the newest at `until`."""
    return [Sample(until - 60.0 * back, value, asked) for back, value in enumerate(reversed(values))][::-1]


def fleet(desired: int = 2, **more: object) -> Fleet:
    return replace(Fleet(desired, ready=desired), **more)  # type: ignore[arg-type]


def test_over_the_upper_threshold_for_five_minutes_is_one_more() -> None:
    verdict = decide(POLICY, NOW, minutes(0.3, 0.71, 0.8, 0.7001, 0.75, 0.72), fleet())
    assert (verdict.kind, verdict.after) == (Kind.UP, 3)
    assert verdict.reason == "Busy over 70 % for 5 min (mean 74 %)"


def test_one_minute_at_the_threshold_is_enough_to_wait() -> None:
    verdict = decide(POLICY, NOW, minutes(0.9, 0.9, 0.7, 0.9, 0.9), fleet())
    assert (verdict.kind, verdict.code, verdict.after) == (Kind.HOLD, "steady", 2)


def test_under_the_lower_threshold_for_half_an_hour_is_one_fewer() -> None:
    assert decide(POLICY, NOW, minutes(*[0.2] * 30), fleet()).kind == Kind.DOWN
    assert decide(POLICY, NOW, minutes(*[0.2] * 29, 0.3), fleet()).kind == Kind.HOLD
    assert decide(POLICY, NOW, minutes(*[0.2] * 26), fleet()).code == "steady"


def test_what_is_not_known_decides_nothing() -> None:
    verdict = decide(POLICY, NOW, minutes(0.9, 0.9, 0.9), fleet())
    assert (verdict.kind, verdict.code) == (Kind.HOLD, "no_data")
    assert verdict.reason == "Only 3 min of the last 5 min are known"
    old = minutes(*[0.9] * 5, until=NOW - 600)
    assert decide(POLICY, NOW, old, fleet()).code == "no_data"


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ({"desired": 4}, "at_max", "at most 4"),
        ({"unplaced": 1}, "no_room", "1 of its replicas found no room"),
        ({"loading": 2}, "loading", "2 of its replicas are still loading"),
        ({"rolling_out": True}, "rollout", "no scaling during a rollout"),
        ({"changed_at": NOW - 120}, "cool_down", "the last change was 2 min ago, and 5 min must pass"),
    ],
)
def test_one_more_is_held_with_its_reason(change: dict[str, object], code: str, word: str) -> None:
    now = fleet(**{"desired": 2, **change})
    verdict = decide(POLICY, NOW, minutes(*[0.8] * 5), now)
    assert (verdict.kind, verdict.code, verdict.after) == (Kind.HOLD, code, now.desired)
    assert f"wants {now.desired + 1}, held: {word}" in verdict.reason


def test_every_reason_to_hold_is_told() -> None:
    verdict = decide(POLICY, NOW, minutes(*[0.8] * 5), fleet(4, rolling_out=True))
    assert verdict.reason.endswith("held: at most 4, and no scaling during a rollout")


def test_a_loading_engine_is_never_scaled_down() -> None:
    quiet = minutes(*[0.1] * 30)
    assert decide(POLICY, NOW, quiet, fleet(loading=1)).code == "loading"
    smaller = replace(POLICY, most=1)
    assert decide(smaller, NOW, quiet, fleet(loading=1)).code == "loading"
    assert decide(smaller, NOW, quiet, fleet()).after == 1


def test_the_least_stays() -> None:
    assert decide(POLICY, NOW, minutes(*[0.1] * 30), fleet(1)).code == "at_min"


def test_one_fewer_that_would_come_back_at_once_is_held() -> None:
    narrow = replace(POLICY, up_at=0.4, down_at=0.3)
    verdict = decide(narrow, NOW, minutes(*[0.28] * 30), fleet(2))
    assert (verdict.kind, verdict.code) == (Kind.HOLD, "would_return")
    assert "the others would be at 56 %" in verdict.reason


def test_over_95_percent_is_a_warning_and_no_more() -> None:
    verdict = decide(replace(POLICY, most=2), NOW, minutes(*[0.97] * 5), fleet())
    assert verdict.warning == "Busy 97 %, over 95 %: latency is bending already"
    assert not decide(POLICY, NOW, minutes(*[0.95] * 5), fleet()).warning
    assert not decide(replace(POLICY, signal="requests"), NOW, minutes(*[40.0] * 5), fleet()).warning


def test_the_last_replica_goes_when_nobody_asked_and_only_where_the_minimum_is_none() -> None:
    to_zero = replace(POLICY, least=0)
    silent, used = minutes(*[0.0] * 30, asked=0.0), minutes(*[0.01] * 30, asked=0.02)
    assert (decide(to_zero, NOW, silent, fleet(1)).kind, decide(to_zero, NOW, silent, fleet(1)).after) == (
        Kind.SLEEP,
        0,
    )
    assert decide(to_zero, NOW, used, fleet(1)).code == "asked"
    assert decide(to_zero, NOW, silent[4:], fleet(1)).kind == Kind.HOLD, "26 minutes are not 30"
    assert decide(to_zero, NOW, silent, fleet(1, changed_at=NOW - 60)).code == "cool_down"
    assert decide(to_zero, NOW, silent, fleet(1, loading=1, ready=0)).code == "loading", "just woken"
    woken_lately = decide(to_zero, NOW, silent, fleet(1, changed_at=NOW - 1000))
    assert (woken_lately.kind, woken_lately.code) == (Kind.HOLD, "asked"), "the silence before it was woken is over"
    assert decide(to_zero, NOW, silent, fleet(1, changed_at=NOW - 1801)).kind == Kind.SLEEP
    assert decide(POLICY, NOW, silent, fleet(1)).after == 1
    assert decide(to_zero, NOW, [], fleet(0)).code == "stopped"


def test_a_request_wakes_what_sleeps() -> None:
    to_zero = replace(POLICY, least=0)
    verdict = woken(to_zero, NOW, 0)
    assert verdict is not None
    assert (verdict.kind, verdict.after) == (Kind.WAKE, 1)
    assert woken(to_zero, NOW, 1) is None
    closed = replace(to_zero, schedules=(Schedule(frozenset(range(7)), 0, 0, "UTC", 0, 0),))
    held = woken(closed, NOW, 0)
    assert held is not None
    assert (held.kind, held.after) == (Kind.HOLD, 0)


NIGHT = {"days": ["mon"], "from": "22:00", "to": "06:00", "zone": "Europe/Berlin", "min": 0, "max": 1}


def test_a_schedule_takes_several_steps_at_once_and_says_so() -> None:
    policy = replace(POLICY, schedules=schedules_of([NIGHT]))
    night = datetime(2026, 3, 2, 22, 30, tzinfo=UTC).timestamp()  # 23:30 in Berlin
    verdict = decide(policy, night, [], fleet(3))
    assert (verdict.kind, verdict.after) == (Kind.SCHEDULE, 1)
    assert verdict.reason == "At most 1 by the schedule mon 22:00–06:00 Europe/Berlin"
    assert decide(policy, night, [], fleet(3, rolling_out=True)).code == "rollout"
    morning = night + 8 * 3600
    assert decide(policy, morning, [], fleet(0)).reason == "At least 1 outside of schedules"


@pytest.mark.parametrize(
    ("at", "holds"),
    [
        ("2026-03-02T20:59", False), ("2026-03-02T21:00", True), ("2026-03-03T04:59", True),
        ("2026-03-03T05:00", False), ("2026-03-02T03:00", False), ("2026-03-03T22:00", False),
    ],
)  # fmt: skip
def test_a_schedule_holds_from_its_days_into_the_next(at: str, holds: bool) -> None:
    (night,) = schedules_of([NIGHT])
    assert night.holds(datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()) is holds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"days": []}, "needs days"), ({"days": ["monday"]}, "needs days"), ({"from": "24:00"}, "needs times"),
        ({"zone": "Mars/Base"}, "no time zone Mars/Base"), ({"zone": "../etc"}, "needs a time zone"),
        ({"min": 2}, "0 ≤ min ≤ max"), ({"max": True}, "whole numbers"), ({"more": 1}, "exactly"),
    ],
)  # fmt: skip
def test_a_schedule_that_makes_no_sense_is_refused_with_what_is_wrong(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedules_of([NIGHT | wrong])


def test_two_days_of_traffic_cost_less_than_static_provisioning_and_nobody_waits() -> None:
    """The bar of the issue, on the recorded tide with vLLM's cold start; simulated, so it gives the same each time."""
    result = bench.measure()
    assert result["share"] <= 0.60
    assert result["queue_wait_p99_s"] < 10.0
    first, second = result["bursts"]
    assert (first["minutes"], second["minutes"]) == ([620, 631], [960, 963])
    assert first["over_10_s"] > 0, "a burst of twice the load costs something, and that is told"
    assert result["most_replicas"] <= bench.POLICY.most
