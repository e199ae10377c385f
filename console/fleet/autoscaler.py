"""How many replicas: a pure decision over windows of a signal, with the reason of every verdict, holds included.

    over `up_at` for `up_after_s`        → one more
    under `down_at` for `down_after_s`   → one fewer; the last one only where `least` is 0 and nobody asked
    outside of the bounds that hold now  → to the bound at once (a schedule began or ended)

A share (busy, utilisation) is compared as a share of 1, requests as requests a second and replica, a wait as seconds.
Every minute of a window must be over or under: a mean would let one bad minute speak for four good ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from console.fleet.models import Deployment, ScaleDecision
from console.fleet.schedules import Schedule, active

PERIOD_S = 60.0  # what one sample covers
COVERED = 0.9  # share of a window that must be known
SATURATED = 0.95  # of a share: latency is bending already

Signal = Deployment.Signal
Kind = ScaleDecision.Verdict
_SHARES = frozenset((Signal.BUSY, Signal.UTILISATION))
_NAMES = {
    Signal.BUSY: "Busy",
    Signal.UTILISATION: "GPU utilisation",
    Signal.REQUESTS: "Load",
    Signal.QUEUE_WAIT: "The wait in the queue",
}


@dataclass(frozen=True)
class Policy:
    """What a deployment asks of its autoscaler. Thresholds are in the unit of the signal, times in seconds."""

    signal: str = Signal.BUSY
    up_at: float = 0.70
    up_after_s: float = 300.0
    down_at: float = 0.25
    down_after_s: float = 1800.0
    cool_down_s: float = 300.0
    least: int = 1
    most: int = 1
    schedules: tuple[Schedule, ...] = ()


@dataclass(frozen=True)
class Sample:
    """The PERIOD_S before `at` (unix seconds): the mean signal of the ready replicas, None without one."""

    at: float
    value: float | None
    asked: float = 0.0  # requests a second, over all replicas


@dataclass(frozen=True)
class Fleet:
    """How many replicas are wanted, and what state they are in."""

    desired: int
    ready: int = 0
    loading: int = 0  # with a worker that is not ready yet
    unplaced: int = 0  # without room
    rolling_out: bool = False
    changed_at: float | None = None  # unix seconds of the last change of `desired`


@dataclass(frozen=True)
class Verdict:
    """How many replicas there should be and why. `kind` HOLD leaves the number as it is."""

    kind: str
    code: str  # of the reason: steady, busy, idle, cool_down, at_max, …
    reason: str  # a sentence
    after: int
    warning: str = ""  # where the signal says that latency is bending already


@dataclass(frozen=True)
class _Window:
    """The samples of the last `seconds`, and whether they are all there."""

    seconds: float
    samples: tuple[Sample, ...]
    whole: bool

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples if sample.value is not None]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else 0.0

    def over(self, bound: float) -> bool:
        return self._known and all(value > bound for value in self.values)

    def under(self, bound: float) -> bool:
        return self._known and all(value < bound for value in self.values)

    @property
    def silent(self) -> bool:
        """Nobody asked for anything, and that is known of all of it."""
        return self.whole and not any(sample.asked for sample in self.samples)

    @property
    def _known(self) -> bool:
        """One minute without a ready replica is forgiven: it was replaced within it."""
        return self.whole and bool(self.values) and len(self.values) >= len(self.samples) - 1


def decide(policy: Policy, now: float, samples: Sequence[Sample], fleet: Fleet) -> Verdict:
    """Return how many replicas there should be.

    Args:
        policy: what the deployment asks for.
        now: unix seconds.
        samples: of at least the longer window, oldest first; what is older does not matter.
        fleet: what there is.
    """
    schedule = active(policy.schedules, now)
    least, most = (policy.least, policy.most) if schedule is None else (schedule.least, schedule.most)
    warning = _warning(policy, samples, now)
    bounded = min(max(fleet.desired, least), most)
    if bounded != fleet.desired:
        return _to_bounds(fleet, bounded, schedule, warning)
    up, down = _window(samples, now, policy.up_after_s), _window(samples, now, policy.down_after_s)
    if up.over(policy.up_at):
        why = _why(policy, "over", policy.up_at, up)
        return _move(1, why, _against_more(policy, now, fleet, most), fleet, warning)
    if fleet.desired == 1 and least == 0:
        return _last_one(policy, now, fleet, down, warning)
    if fleet.desired and down.under(policy.down_at):
        why = _why(policy, "under", policy.down_at, down)
        return _move(-1, why, _against_fewer(policy, now, fleet, least, down), fleet, warning)
    return _steady(policy, fleet, up, warning)


def woken(policy: Policy, now: float, desired: int) -> Verdict | None:
    """What a request for a deployment without replicas comes to; None where it has some already."""
    if desired:
        return None
    schedule = active(policy.schedules, now)
    most = policy.most if schedule is None else schedule.most
    if not most:
        which = schedule.told if schedule is not None else "its maximum"
        return Verdict(Kind.HOLD, "at_max", f"A request asked for it; held: {which} allows no replica", 0)
    return Verdict(Kind.WAKE, "asked", "A request asked for it", 1)


def _to_bounds(fleet: Fleet, bounded: int, schedule: Schedule | None, warning: str) -> Verdict:
    word = "at least" if bounded > fleet.desired else "at most"
    where = f"by {schedule.told}" if schedule is not None else "outside of schedules"
    reason = f"{word.capitalize()} {bounded} {where}"
    if bounded < fleet.desired and fleet.loading:
        return Verdict(Kind.HOLD, "loading", f"{reason}; held: {_loading(fleet)}", fleet.desired, warning)
    if bounded < fleet.desired and fleet.rolling_out:
        return Verdict(Kind.HOLD, "rollout", f"{reason}; held: a rollout is under way", fleet.desired, warning)
    return Verdict(Kind.SCHEDULE, "schedule" if schedule is not None else "bounds", reason, bounded, warning)


def _last_one(policy: Policy, now: float, fleet: Fleet, down: _Window, warning: str) -> Verdict:
    """Whether the last replica goes: only when nobody asked, however little it has to do."""
    if not down.samples or not down.whole:
        return _steady(policy, fleet, down, warning)
    if not down.silent:
        reason = f"Requests came within the last {_time(down.seconds)}: the last replica stays"
        return Verdict(Kind.HOLD, "asked", reason, fleet.desired, warning)
    against = [("loading", _loading(fleet))] if fleet.loading else []
    against += _always_against(policy, now, fleet)
    if fleet.changed_at is not None and 0 <= now - fleet.changed_at < policy.down_after_s:
        against.append(("asked", f"it was started or scaled only {_time(now - fleet.changed_at)} ago"))
    verdict = _move(-1, f"Nobody asked for {_time(down.seconds)}", against, fleet, warning)
    return verdict if verdict.kind == Kind.HOLD else Verdict(Kind.SLEEP, "idle", verdict.reason, 0, warning)


def _move(by: int, why: str, against: list[tuple[str, str]], fleet: Fleet, warning: str) -> Verdict:
    after = fleet.desired + by
    if not against:
        kind, code = (Kind.UP, "busy") if by > 0 else (Kind.DOWN, "quiet")
        return Verdict(kind, code, why, after, warning)
    reasons = ", and ".join(reason for _code, reason in against)
    return Verdict(Kind.HOLD, against[0][0], f"{why}: wants {after}, held: {reasons}", fleet.desired, warning)


def _against_more(policy: Policy, now: float, fleet: Fleet, most: int) -> list[tuple[str, str]]:
    against = []
    if fleet.desired >= most:
        against.append(("at_max", f"at most {most}"))
    if fleet.unplaced:
        against.append(("no_room", f"{fleet.unplaced} of its replicas found no room yet"))
    if fleet.loading:  # what it will take on is not known yet
        against.append(("loading", _loading(fleet)))
    return against + _always_against(policy, now, fleet)


def _against_fewer(policy: Policy, now: float, fleet: Fleet, least: int, down: _Window) -> list[tuple[str, str]]:
    against = []
    if fleet.desired <= least:
        against.append(("at_min", f"at least {least}"))
    else:
        left = down.mean * fleet.desired / max(fleet.desired - 1, 1)
        if policy.signal != Signal.QUEUE_WAIT and left > policy.up_at:
            told = _told(policy, left)
            against.append(("would_return", f"the others would be at {told}, and one more would be wanted again"))
    if fleet.loading:
        against.append(("loading", _loading(fleet)))
    return against + _always_against(policy, now, fleet)


def _always_against(policy: Policy, now: float, fleet: Fleet) -> list[tuple[str, str]]:
    against = []
    if fleet.rolling_out:
        against.append(("rollout", "no scaling during a rollout"))
    if fleet.changed_at is not None and 0 <= now - fleet.changed_at < policy.cool_down_s:
        since = _time(now - fleet.changed_at)
        against.append(("cool_down", f"the last change was {since} ago, and {_time(policy.cool_down_s)} must pass"))
    return against


def _steady(policy: Policy, fleet: Fleet, window: _Window, warning: str) -> Verdict:
    if not fleet.desired:
        return Verdict(Kind.HOLD, "stopped", "Stopped; a request starts it", 0, warning)
    if not window.whole or not window.values:
        known = len(window.values) * PERIOD_S
        reason = f"Only {_time(known)} of the last {_time(window.seconds)} are known"
        return Verdict(Kind.HOLD, "no_data", reason, fleet.desired, warning)
    low, high = _told(policy, policy.down_at), _told(policy, policy.up_at)
    reason = (
        f"{_name(policy)} was not over {high} or under {low} for long enough (now {_told(policy, window.values[-1])})"
    )
    return Verdict(Kind.HOLD, "steady", reason, fleet.desired, warning)


def _warning(policy: Policy, samples: Sequence[Sample], now: float) -> str:
    newest = samples[-1] if samples else None
    if newest is None or newest.value is None or policy.signal not in _SHARES or now - newest.at > 2 * PERIOD_S:
        return ""
    if newest.value <= SATURATED:
        return ""
    return f"{_name(policy)} {_told(policy, newest.value)}, over {_told(policy, SATURATED)}: latency is bending already"


def _window(samples: Sequence[Sample], now: float, seconds: float) -> _Window:
    since = now + PERIOD_S / 2 - seconds
    within = tuple(sample for sample in samples if since < sample.at <= now + 1)
    needed = max(1.0, seconds * COVERED / PERIOD_S)
    return _Window(seconds, within, len(within) >= needed)


def _loading(fleet: Fleet) -> str:
    return f"{fleet.loading} of its replicas " + ("is still loading" if fleet.loading == 1 else "are still loading")


def _why(policy: Policy, side: str, bound: float, window: _Window) -> str:
    mean = _told(policy, window.mean)
    return f"{_name(policy)} {side} {_told(policy, bound)} for {_time(window.seconds)} (mean {mean})"


def _name(policy: Policy) -> str:
    return _NAMES[Signal(policy.signal)]


def _told(policy: Policy, value: float) -> str:
    if policy.signal in _SHARES:
        return f"{value * 100:.0f} %"
    return f"{value:.3g} s" if policy.signal == Signal.QUEUE_WAIT else f"{value:.3g} requests/s a replica"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 and seconds % 60 else f"{seconds / 60:.0f} min"
