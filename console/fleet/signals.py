"""Signals of deployments by the minute, and the autoscaler acting on them; part of the controller's loop.

Each minute's samples are rows, so that a new leader decides by the same minutes as the last. A request for a deployment
without replicas leaves a key in Valkey, which is looked for at every tick.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import redis

from console.fleet import autoscaler, live, scale_actions
from console.fleet.autoscaler import Fleet, Policy, Sample, Verdict
from console.fleet.models import Deployment, Replica, RouteTarget, ScaleDecision, SignalSample
from console.fleet.schedules import Schedule, schedules_of
from console.placement.models import Device
from console.telemetry.demand import Demand, demand
from console.telemetry.queries import TooSlow, reading

log = logging.getLogger(__name__)

SAMPLE_S = 1.0
SETTLE_S = 5.0  # after a minute's end: its requests are in the database by then
TIMEOUT_MS = 2_000
KEPT = timedelta(days=7)
WAKE = "fl:wake:"
State = Replica.State
_LOADING = frozenset((State.STARTING, State.LOADING, State.VERIFYING))
Stats = Mapping[str, Mapping[str, Any]]


@dataclass
class _Sums:
    """A deployment's signals since the minute began."""

    looks: int = 0
    busy: float = 0.0
    utilisation: float = 0.0
    measured: int = 0  # looks at which the utilisation was known

    def add(self, busy: Sequence[float], utilisation: Sequence[float]) -> None:
        if busy:
            self.looks += 1
            self.busy += sum(busy) / len(busy)
        if utilisation:
            self.measured += 1
            self.utilisation += sum(utilisation) / len(utilisation)


@dataclass(frozen=True)
class Group:
    """A deployment with its replicas, and whether a rollout goes on."""

    deployment: Deployment
    replicas: tuple[Replica, ...]
    rolling_out: bool = False

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.wanted and replica.state == State.READY]


@dataclass
class Signals:
    """Watches all deployments. What it sums up within a minute is all that a new leader has to learn anew."""

    _minute: int = 0
    _sampled_at: float = 0.0  # monotonic
    _sums: dict[UUID, _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    _valkey: redis.Redis = field(default_factory=live.client)

    def look(self, groups: Sequence[Group], stats: Stats, now: float | None = None) -> None:
        """Sample, and once a minute write and decide. `now` is unix seconds. Raises DatabaseError."""
        wall = time.time() if now is None else now
        self._wake([group for group in groups if _sleeps(group.deployment)], wall)
        if now is not None or time.monotonic() - self._sampled_at >= SAMPLE_S:
            self._sampled_at = time.monotonic()
            self._sample(groups, stats)
        minute = int((wall - SETTLE_S) // 60)
        if not self._minute:
            self._minute = minute
        if minute != self._minute:
            self._minute = minute
            self._close(groups, datetime.fromtimestamp((minute - 1) * 60, UTC))
            for group in groups:
                if group.deployment.autoscale:
                    self._decide(group, wall)

    # -- what is seen -------------------------------------------------------------------------------------------------

    def _sample(self, groups: Sequence[Group], stats: Stats) -> None:
        shown = {uid for group in groups for replica in group.ready for uid in replica.devices}
        devices = Device.objects.filter(uid__in=shown, kind=Device.Kind.GPU, utilisation__isnull=False)
        utilisation = {device.uid: device.utilisation or 0.0 for device in devices} if shown else {}
        for group in groups:
            told = [stats.get(str(replica.id), {}).get("busy") for replica in group.ready]
            used = [utilisation[uid] for replica in group.ready for uid in replica.devices if uid in utilisation]
            busy = [each for each in told if each is not None]
            self._sums[group.deployment.id].add(busy, used)

    def _close(self, groups: Sequence[Group], minute: datetime) -> None:
        """Write the minute that has ended."""
        sums, self._sums = self._sums, defaultdict(_Sums)
        asked = _asked(minute, [group.deployment.id for group in groups])
        rows = [
            _row(
                group, minute, sums[group.deployment.id], asked.get(group.deployment.id) if asked is not None else None
            )
            for group in groups
            if group.deployment.engine != Deployment.Engine.EXTERNAL
        ]
        SignalSample.objects.bulk_create(rows, ignore_conflicts=True)
        if minute.minute == 0:
            SignalSample.objects.filter(minute__lt=minute - KEPT).delete()

    # -- what follows -------------------------------------------------------------------------------------------------

    def _decide(self, group: Group, now: float) -> None:
        deployment = group.deployment
        policy = policy_of(deployment)
        samples = samples_of(deployment, now, max(policy.up_after_s, policy.down_after_s))
        verdict = autoscaler.decide(policy, now, samples, fleet_of(group))
        value = samples[-1].value if samples else None
        _act(deployment, verdict, policy, value)

    def _wake(self, asleep: Sequence[Group], now: float) -> None:
        """Valkey away: nobody is woken, and requests are told to come back."""
        if not asleep:
            return
        keys = [f"{WAKE}{group.deployment.id}" for group in asleep]
        with contextlib.suppress(redis.RedisError):
            for group, asked in zip(asleep, self._valkey.mget(keys), strict=True):
                if asked is not None:
                    self._valkey.delete(f"{WAKE}{group.deployment.id}")
                    wake(group.deployment, now)


def wake(deployment: Deployment, now: float | None = None) -> None:
    """A request asked for a deployment that sleeps: one replica is wanted, unless a schedule forbids it."""
    policy = policy_of(deployment)
    verdict = autoscaler.woken(policy, time.time() if now is None else now, deployment.desired_replicas)
    if verdict is not None:
        _act(deployment, verdict, policy, None)


def policy_of(deployment: Deployment) -> Policy:
    """What a deployment asks of its autoscaler."""
    return Policy(
        signal=deployment.signal,
        up_at=deployment.scale_up_at,
        up_after_s=deployment.scale_up_after_s,
        down_at=deployment.scale_down_at,
        down_after_s=deployment.scale_down_after_s,
        cool_down_s=deployment.cool_down_s,
        least=deployment.min_replicas,
        most=deployment.max_replicas,
        schedules=_schedules(deployment),
    )


def samples_of(deployment: Deployment, now: float, seconds: float) -> list[Sample]:
    """The deployment's minutes of the last `seconds`, oldest first, by its own signal."""
    since = datetime.fromtimestamp(now - seconds - 120, UTC)
    rows = SignalSample.objects.filter(deployment=deployment, minute__gte=since).order_by("minute")
    return [_sample_of(row, deployment.signal) for row in rows]


def fleet_of(group: Group) -> Fleet:
    """What the autoscaler wants to know of the replicas."""
    wanted = [replica for replica in group.replicas if replica.wanted]
    changes = ScaleDecision.objects.filter(deployment=group.deployment).exclude(verdict=ScaleDecision.Verdict.HOLD)
    last = changes.values_list("at", flat=True).first()
    return Fleet(
        desired=group.deployment.desired_replicas,
        ready=len(group.ready),
        loading=sum(replica.state in _LOADING for replica in wanted),
        unplaced=sum(replica.state == State.PENDING and bool(replica.reason) for replica in wanted),
        rolling_out=group.rolling_out,
        changed_at=last.timestamp() if last is not None else None,
    )


def _act(deployment: Deployment, verdict: Verdict, policy: Policy, value: float | None) -> None:
    signal = {
        "name": policy.signal,
        "value": value,
        "up_at": policy.up_at,
        "down_at": policy.down_at,
        "warning": verdict.warning,
    }
    made = scale_actions.decided(deployment, verdict, signal)
    if made is not None:
        log.info("autoscaler: %s: %s → %s, %s", deployment, made.before, made.after, made.reason)


def _sleeps(deployment: Deployment) -> bool:
    return deployment.autoscale and not deployment.desired_replicas


def _schedules(deployment: Deployment) -> tuple[Schedule, ...]:
    try:
        return schedules_of(deployment.schedules)
    except ValueError as error:  # they are checked when they are written; a zone may have gone with an upgrade
        log.warning("autoscaler: schedules of %s are not followed: %s", deployment, error)
        return ()


def _asked(minute: datetime, deployments: Iterable[UUID]) -> dict[UUID, Demand] | None:
    """What was asked within a minute; None where the database did not say in time."""
    routes: dict[UUID, set[str]] = {deployment_id: set() for deployment_id in deployments}
    for name, deployment_id in RouteTarget.objects.values_list("route__name", "deployment_id"):
        routes.setdefault(deployment_id, set()).add(name)
    try:
        with reading(TIMEOUT_MS):
            return demand(
                minute, minute + timedelta(minutes=1), {each: frozenset(names) for each, names in routes.items()}
            )
    except TooSlow:
        log.warning("autoscaler: requests of a minute could not be counted within %d ms", TIMEOUT_MS)
        return None


def _row(group: Group, minute: datetime, sums: _Sums, asked: Demand | None) -> SignalSample:
    ready = len(group.ready)
    return SignalSample(
        deployment=group.deployment,
        minute=minute,
        replicas=ready,
        busy=sums.busy / sums.looks if sums.looks else None,
        utilisation=sums.utilisation / sums.measured if sums.measured else None,
        requests=None if asked is None else asked.requests / 60 / max(ready, 1),
        queue_wait=None if asked is None else asked.queue_wait_s,
    )


def _sample_of(row: SignalSample, signal: str) -> Sample:
    """Whoever still runs something counts as asked for, though nobody new came."""
    asked = (row.requests or 0.0) * max(row.replicas, 1) + (row.busy or 0.0)
    if row.requests is None:
        asked = asked or 1.0  # nobody knows: not a reason to stop
    value = getattr(row, signal) if row.replicas else None
    return Sample(row.minute.timestamp() + autoscaler.PERIOD_S, value, asked)
