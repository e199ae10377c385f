"""What one deployment's page shows: replicas, a rollout as lanes, what the autoscaler did and why, changes, logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Q, Sum
from django.utils import timezone

from console.dashboards.overview import ReplicaNow
from console.fleet import live, rollout_steps
from console.fleet.models import (
    Deployment,
    Replica,
    Revision,
    Rollout,
    ScaleDecision,
    SignalSample,
    StackCapture,
    Transition,
)
from console.fleet.worker_logs import search_log
from console.placement.models import Decision, Reservation

WIDTH = 1000.0  # of drawings; they stretch to the panel
LANE_H = 28
CHART_H = 150.0
MARKS = 6
SHOWN_TRANSITIONS = 40
SHOWN_LINES = 200
SHOWN_REPLICAS = 8
_SERVES = {Replica.State.READY}
_SHARES = {Deployment.Signal.BUSY, Deployment.Signal.UTILISATION}


@dataclass(frozen=True)
class Bar:
    """A stretch of one state in a lane."""

    css: str
    x: float
    width: float
    state: str
    since: datetime
    reason: str


@dataclass(frozen=True)
class Lane:
    """One replica through a rollout."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Mark:
    """A decision of the autoscaler, lettered on the chart."""

    letter: str
    x: float | None  # None: before what the chart shows
    decision: ScaleDecision


@dataclass(frozen=True)
class Chart:
    """The signal over time with both thresholds, and the number of replicas below it."""

    line: str  # of an SVG path
    steps: str
    up_y: float
    down_y: float
    top: float  # value at the upper edge
    newest: float | None
    since: datetime
    until: datetime
    most: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Detail:
    """Everything but the log."""

    replicas: list[ReplicaNow]
    ready: int
    rollout: Rollout | None
    steps: tuple[rollout_steps.Step, ...]
    lanes: tuple[Lane, ...]
    now_x: float
    revisions: list[Revision]
    stacks: list[StackCapture]
    chart: Chart | None
    decisions: list[Mark]
    transitions: list[Transition]
    refusal: Decision | None

    @property
    def lanes_height(self) -> int:
        """Of the drawing, in pixels."""
        return LANE_H * len(self.lanes)

    @classmethod
    def of(cls, deployment: Deployment) -> Detail:
        """Read it, in a dozen small queries."""
        replicas = list(deployment.replicas.select_related("deployment"))
        stats = live.read(str(replica.id) for replica in replicas)
        held = _held(deployment)
        rollout = deployment.rollouts.first()
        until = timezone.now()
        marks = _decisions(deployment)
        chart = _chart(deployment, marks, until)
        waiting = [each.id for each in replicas if each.state == Replica.State.PENDING]
        return cls(
            replicas=[
                ReplicaNow.of(each, stats.get(str(each.id)), held.get(each.id)) for each in replicas if _shown(each)
            ],
            ready=sum(each.state == Replica.State.READY for each in replicas),
            rollout=rollout,
            steps=rollout_steps.steps(rollout, replicas, stats) if rollout else (),
            lanes=_lanes(rollout, replicas, until) if rollout else (),
            now_x=_window(rollout, until)[2](until) if rollout and rollout.ended_at is None else -1,
            revisions=list(deployment.revisions.all()[:12]),
            stacks=list(StackCapture.objects.filter(replica__deployment=deployment).select_related("replica")[:3]),
            chart=chart,
            decisions=list(chart.marks) if chart else marks,
            transitions=_transitions(deployment, replicas),
            refusal=Decision.objects.filter(replica_id__in=waiting, placed=False).first() if waiting else None,
        )


def _held(deployment: Deployment) -> dict[UUID, int]:
    """Measured bytes of each replica, on all of its devices."""
    lines = Reservation.objects.filter(deployment_id=deployment.pk, state=Reservation.State.RESERVED)
    sums = lines.exclude(measured_bytes=None).values("replica_id").annotate(held=Sum("measured_bytes"))
    return {each["replica_id"]: each["held"] for each in sums.order_by()}


def _shown(replica: Replica) -> bool:
    """Not those of earlier rollouts that are gone for good."""
    return replica.wanted or replica.state != Replica.State.STOPPED


def _transitions(deployment: Deployment, replicas: Sequence[Replica]) -> list[Transition]:
    subjects = [each.id for each in replicas] + list(deployment.rollouts.values_list("id", flat=True)[:20])
    found = Transition.objects.filter(Q(subject_id__in=subjects) | Q(subject_id=deployment.id))
    return list(found[:SHOWN_TRANSITIONS])


# -- a rollout as lanes ------------------------------------------------------------------------------------------------


def _window(rollout: Rollout, until: datetime) -> tuple[datetime, datetime, Any]:
    """From a little before it until its end or now, and where a moment lies on the drawing."""
    end = rollout.ended_at or until
    long = max(end - rollout.started_at, timedelta(seconds=5))
    begin, end = rollout.started_at - long * 0.08, end + long * 0.04
    whole = (end - begin).total_seconds()

    def x(at: datetime) -> float:
        return round(min(max((at - begin).total_seconds() / whole, 0.0), 1.0) * WIDTH, 1)

    return begin, end, x


def _lanes(rollout: Rollout, replicas: Sequence[Replica], until: datetime) -> tuple[Lane, ...]:
    """Each replica that had a part in it, as stretches of its states."""
    begin, end, x = _window(rollout, until)
    last = rollout.ended_at or until
    ids = [each.id for each in replicas]
    rows = Transition.objects.filter(subject_id__in=ids, at__lte=end).order_by("id")
    moves: dict[Any, list[Transition]] = {}
    for row in rows:
        moves.setdefault(row.subject_id, []).append(row)
    lanes: list[Lane] = []
    for replica in replicas:
        bars = _bars(moves.get(replica.id, []), begin, last, x, replica.revision == rollout.to_revision)
        if any(bar.state != Replica.State.STOPPED for bar in bars):
            lanes.append(Lane(f"r{replica.ordinal}", bars))
    return tuple(lanes)


def _bars(moves: Sequence[Transition], begin: datetime, last: datetime, x: Any, is_new: bool) -> tuple[Bar, ...]:
    bars = []
    for number, move in enumerate(moves):
        ends = moves[number + 1].at if number + 1 < len(moves) else last
        if ends <= begin or move.new == Replica.State.PENDING:
            continue
        left, right = x(move.at), x(ends)
        bars.append(Bar(_lane_css(move.new, is_new), left, max(1.5, right - left - 1), move.new, move.at, move.reason))
    return tuple(bars)


def _lane_css(state: str, is_new: bool) -> str:
    if state in _SERVES:
        return "ro-new" if is_new else "ro-serve"
    if state in {Replica.State.FAILED, Replica.State.HUNG}:
        return "ro-bad"
    return "ro-gone" if state == Replica.State.STOPPED else "ro-now"


# -- the autoscaler ----------------------------------------------------------------------------------------------------


def _decisions(deployment: Deployment) -> list[Mark]:
    """The newest decisions, oldest first, with letters."""
    newest = list(deployment.scale_decisions.all()[:MARKS])[::-1]
    return [Mark(chr(ord("A") + number), None, each) for number, each in enumerate(newest)]


def _chart(deployment: Deployment, marks: Sequence[Mark], until: datetime) -> Chart | None:
    """The last six hours of the signal, or as much of them as there is; None before the first two samples."""
    since = until - timedelta(hours=6)
    samples = [
        (each.minute, getattr(each, deployment.signal), each.replicas)
        for each in SignalSample.objects.filter(deployment=deployment, minute__gte=since)
    ]
    if len(samples) < 2:
        return None
    since = samples[0][0]
    whole = max((until - since).total_seconds(), 60.0)
    values = [value for _at, value, _count in samples if value is not None]
    top = 1.0 if deployment.signal in _SHARES else max([*values, deployment.scale_up_at]) * 1.15

    def x(at: datetime) -> float:
        return round((at - since).total_seconds() / whole * WIDTH, 1)

    def y(value: float) -> float:
        return round(CHART_H * (1 - min(value / top, 1.0)), 1)

    most = max(1, *(count for _at, _value, count in samples))
    return Chart(
        line=_path([(x(at), None if value is None else y(value)) for at, value, _count in samples]),
        steps=_steps([(x(at), count) for at, _value, count in samples], most),
        up_y=y(deployment.scale_up_at),
        down_y=y(deployment.scale_down_at),
        top=top,
        newest=values[-1] if values else None,
        since=since,
        until=until,
        most=most,
        marks=tuple(Mark(m.letter, x(m.decision.at) if m.decision.at >= since else None, m.decision) for m in marks),
    )


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    """A line with gaps where nothing is known."""
    parts, pen_down = [], False
    for x, y in points:
        if y is not None:
            parts.append(f"{'L' if pen_down else 'M'}{x:g} {y:g}")
        pen_down = y is not None
    return " ".join(parts)


def _steps(points: Sequence[tuple[float, int]], most: int) -> str:
    """The number of replicas as a staircase 30 high."""
    parts = []
    for number, (x, count) in enumerate(points):
        y = 30 - 28 * count / most
        parts.append(f"M{x:g} {y:.1f}" if number == 0 else f"H{x:g} V{y:.1f}")
    return " ".join(parts)


# -- logs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """Lines of all workers' logs as (replica, line), and how many matched of those that were searched."""

    find: str
    lines: list[tuple[str, str]]
    total: int
    searched: int


def log_of(deployment: Deployment, find: str = "") -> Log:
    """The newest lines of each of its workers' logs that hold a text, or simply the newest; newest first."""
    lines: list[tuple[str, str]] = []
    total = searched = 0
    for replica in deployment.replicas.filter(wanted=True)[:SHOWN_REPLICAS]:
        found = search_log(replica.id, find, SHOWN_LINES)
        lines += [(f"r{replica.ordinal}", line.text) for line in reversed(found.lines)]
        total, searched = total + found.total, searched + found.searched
    return Log(find, lines, total, searched)
