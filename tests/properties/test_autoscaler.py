"""What holds for any sequence of decisions of the autoscaler."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from console.fleet.autoscaler import Fleet, Policy, Sample, Verdict, decide
from console.fleet.models import ScaleDecision
from console.fleet.schedules import Schedule

Kind = ScaleDecision.Verdict
VALUES = st.none() | st.floats(0, 1)
SCHEDULES = st.builds(
    lambda days, begin, end, least, more: Schedule(days, begin, end, "UTC", least, least + more),
    st.frozensets(st.integers(0, 6), min_size=1), st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 3),
    st.integers(0, 4),
)  # fmt: skip
POLICIES = st.builds(
    lambda least, more, schedules, cool: Policy(
        least=least, most=least + more, schedules=tuple(schedules), cool_down_s=cool
    ),
    st.integers(0, 3), st.integers(0, 5), st.lists(SCHEDULES, max_size=2), st.sampled_from([0.0, 300.0, 900.0]),
)  # fmt: skip


@given(
    policy=POLICIES,
    now=st.floats(1_700_000_000, 1_900_000_000),
    values=st.lists(st.tuples(VALUES, st.sampled_from([0.0, 2.0])), max_size=40)
    | st.lists(st.tuples(st.floats(0, 0.1), st.just(0.0)), min_size=30, max_size=40),
    fleet=st.builds(
        Fleet, st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.integers(0, 2), st.booleans(),
        st.none() | st.floats(1_700_000_000, 1_900_000_000),
    ),
)  # fmt: skip
def test_any_verdict_has_a_reason_and_stays_within_the_bounds(
    policy: Policy, now: float, values: list[tuple[float | None, float]], fleet: Fleet
) -> None:
    samples = [
        Sample(now - 60 * back, value, asked) for back, (value, asked) in reversed(list(enumerate(reversed(values))))
    ]
    verdict = decide(policy, now, samples, fleet)
    _check(verdict, policy, now, fleet)
    if verdict.kind == Kind.SLEEP:
        assert not any(asked for _value, asked in values[-30:])


def _check(verdict: Verdict, policy: Policy, now: float, fleet: Fleet) -> None:
    schedule = next((each for each in policy.schedules if each.holds(now)), None)
    least, most = (schedule.least, schedule.most) if schedule else (policy.least, policy.most)
    assert verdict.reason
    assert verdict.code
    if verdict.kind == Kind.HOLD:
        assert verdict.after == fleet.desired
        return
    assert least <= verdict.after <= most
    assert verdict.after != fleet.desired
    if verdict.after < fleet.desired:
        assert not fleet.loading, "a loading engine is never scaled down"
        assert not fleet.rolling_out
    if verdict.kind != Kind.SCHEDULE:
        assert abs(verdict.after - fleet.desired) == 1
        assert fleet.changed_at is None or not 0 <= now - fleet.changed_at < policy.cool_down_s


@given(st.lists(st.floats(0.26, 0.69), min_size=40, max_size=120), st.integers(1, 4))
def test_between_the_thresholds_nothing_ever_changes(values: list[float], desired: int) -> None:
    policy = Policy(least=1, most=5)
    samples = [Sample(60.0 * at, value, 1.0) for at, value in enumerate(values, 1)]
    for at in range(30, len(samples) + 1):
        assert decide(policy, 60.0 * at, samples[:at], Fleet(desired, desired)).after == desired


@given(st.lists(st.floats(0, 1), min_size=60, max_size=240))
def test_changes_are_apart_by_the_cool_down(values: list[float]) -> None:
    policy, desired, changed = Policy(least=1, most=8), 3, list[float]()
    samples: list[Sample] = []
    for at, value in enumerate(values, 1):
        samples.append(Sample(60.0 * at, value, 1.0))
        fleet = Fleet(desired, desired, changed_at=changed[-1] if changed else None)
        verdict = decide(policy, 60.0 * at, samples, fleet)
        if verdict.after != desired:
            desired = verdict.after
            changed.append(60.0 * at)
    assert all(later - earlier >= policy.cool_down_s for earlier, later in zip(changed, changed[1:], strict=False))
