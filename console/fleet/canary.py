"""The controller's part of canaries: look at what requests say, judge, roll back.

A canary is judged against all stable targets of its route together, by requests since it got its weight. A shadow is
judged and shown, and never rolled back: nobody is served by it, and watching one that fails is what it is there for. A
canary without a stable target that could take over stays too, as "failing", until there is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

import msgspec
from django.db.models import Q, QuerySet
from django.utils import timezone

from console.fleet.canary_actions import State, begin, conclude, roll_back, suspend
from console.fleet.models import Replica, Route, RouteTarget, TargetAnalysis
from console.telemetry.queries import TooSlow, reading
from console.telemetry.route_figures import TargetCounts, target_counts
from console.telemetry.windows import LONGEST, Window
from serving import canary
from serving.port import Objectives

log = logging.getLogger(__name__)

EVERY_S = 2.0
TIMEOUT_MS = 2_000  # of one route's query: replicas wait for the controller meanwhile
BUSY = 0.05  # share of its time that the controller may spend here
Role = RouteTarget.Role


class Canaries:
    """Looks at every canary and shadow once in a while."""

    def __init__(self) -> None:
        self._due = 0.0

    def look(self) -> None:
        """Judge them all, if it is time again. Raises DatabaseError."""
        began = time.monotonic()
        if began < self._due:
            return
        try:
            for route in Route.objects.filter(pk__in=_judged()):
                look_at(route)
        finally:
            ended = time.monotonic()
            self._due = ended + max(EVERY_S, (ended - began) / BUSY)


def look_at(route: Route, now: datetime | None = None) -> None:
    """Judge each canary and shadow of a route by what is recorded until now, and act on it."""
    now = now or timezone.now()
    targets = list(route.targets.select_related("route", "deployment", "analysis"))
    for target in targets:
        analysis = getattr(target, "analysis", None)
        if target.role == Role.STABLE or not target.weight:
            if analysis is not None and analysis.weight:
                suspend(analysis)
            continue
        if analysis is None or (analysis.weight, analysis.role) != (target.weight, target.role):
            begin(target, now)
            continue
        analysis.target = target
        try:
            _judge(analysis, targets, now)
        except TooSlow:
            log.warning("canary: requests of %s could not be counted within %d ms", route, TIMEOUT_MS)


def _judge(analysis: TargetAnalysis, targets: Sequence[RouteTarget], now: datetime) -> None:
    target, objectives = analysis.target, objectives_of(analysis.target.route)
    stable = [each for each in targets if each.role == Role.STABLE]
    window = Window(max(analysis.since, now - LONGEST), now + timedelta(minutes=1), "custom")
    with reading(TIMEOUT_MS):
        counts = target_counts(
            target.route.name,
            [target.deployment_id, *(each.deployment_id for each in stable)],
            window,
            objectives.ttft_p99_ms,
            objectives.itl_p99_ms,
        )
    others = _together(counts, (each.deployment_id for each in stable))
    verdict = canary.judge(others, _together(counts, [target.deployment_id]), objectives)
    measures = [msgspec.to_builtins(each) for each in verdict.measures]
    may_go = target.role == Role.CANARY and _can_take_over(stable)
    if verdict.action == canary.ROLLBACK and may_go:
        if roll_back(analysis, verdict.reason, measures, now):
            log.warning("canary: %s of %s was rolled back: %s", target.deployment, target.route, verdict.reason)
        return
    conclude(analysis, next_state(analysis.state, verdict.action), verdict.reason, measures, now)


def next_state(state: str, action: str) -> str:
    """What a verdict that takes no share away makes of an analysis: passing once is enough."""
    if action == canary.ROLLBACK:
        return State.FAILING
    if action == canary.PASS or state == State.PASSED:
        return State.PASSED
    return State.RUNNING


def objectives_of(route: Route) -> Objectives:
    """What a route promises."""
    return Objectives(**{name: getattr(route, f"objective_{name}") for name in Objectives.__struct_fields__})


def _together(counts: Mapping[UUID, TargetCounts], deployments: Iterable[UUID]) -> canary.Observed:
    found = [counts.get(each, TargetCounts()) for each in deployments]

    def total(name: str) -> tuple[int, int]:
        pairs = [getattr(each, name) for each in found]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    return canary.Observed(errors=total("errors"), ttft=total("ttft"), itl=total("itl"))


def _can_take_over(stable: Sequence[RouteTarget]) -> bool:
    deployments = [each.deployment_id for each in stable if each.weight]
    return Replica.objects.filter(deployment__in=deployments, state=Replica.State.READY).exists()


def _judged() -> QuerySet[RouteTarget, UUID]:
    """Routes with a canary or shadow that gets requests, or with one that has just stopped to."""
    gets = ~Q(role=Role.STABLE) & Q(weight__gt=0)
    return RouteTarget.objects.filter(gets | Q(analysis__weight__gt=0)).values_list("route_id", flat=True)
