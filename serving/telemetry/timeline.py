"""One timeline of a request from independent stamps on both sides. Pure: stamps in, phases out.

The gateway stamps with time.monotonic_ns(); the engine reports its own monotonic stamps and the boot id of its machine.
Where both share a boot the clocks are one ("shared"); else the engine's are mapped through a (wall, monotonic) anchor
taken on each side ("wall"), and dropped if the result is absurd, as after a clock step. The events of an engine that
tells only how long things took are laid out on the gateway's clock ("durations", see telemetry.durations).

Nothing is clamped: an overlap or a gap between two phases is shown as it is, and what no phase covers is reported as
unattributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

Event = tuple[str, int, dict[str, Any]]
Span = tuple[int, int]
MAX_CHUNK_PARTS = 16
DURATIONS = "durations"
_ABSURD_NS = 5_000_000_000  # a mapped stamp this far outside the request proves the anchors wrong


class Anchor(msgspec.Struct, frozen=True):
    """The same instant on the wall clock and on the monotonic one."""

    wall_ns: int
    mono_ns: int


class EngineReport(msgspec.Struct):
    """What an engine tells of one sequence; the embedded one in the chunk's `fanlight` field."""

    clock: str = ""  # DURATIONS: its events are on the gateway's clock
    boot_id: str = ""
    anchor: Anchor | None = None
    events: list[Event] = []
    dropped: int = 0
    sequence_id: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0  # of the cached ones, those that came from host memory
    computed_tokens: int = 0
    block_size: int = 0
    preemptions: int = 0

    def merged(self, earlier: EngineReport | None) -> EngineReport:
        """The newest facts and the events of both, each once and in order."""
        if earlier is not None:
            seen = {(name, at) for name, at, _ in self.events}
            self.events = [e for e in earlier.events if (e[0], e[1]) not in seen] + self.events
            self.events.sort(key=lambda event: event[1])
        return self


class Stamps(msgspec.Struct):
    """Monotonic nanoseconds at the gateway; 0 means that it never came to that."""

    received: int
    authenticated: int = 0
    body: int = 0
    admitted: int = 0
    held: int = 0  # it waits for a deployment to be started, until `awake`; 0 where there was no need
    awake: int = 0
    claimed: int = 0  # the coordinator's word on limits and a slot
    granted: int = 0  # the end of waiting for a slot; 0 where there was none
    routed: int = 0  # the replica is chosen: everything from here to the engine's RECEIVED is `connect`
    posted: int = 0  # the request is handed to the connection
    first_chunk: int = 0
    first_sent: int = 0
    last_chunk: int = 0
    ended: int = 0  # the engine's stream ended, broke or was cut
    delivered: int = 0
    settled: int = 0


class FailedAttempt(msgspec.Struct, frozen=True):
    """A dispatch that came to nothing before the client got a byte."""

    replica_id: str
    error: str
    routed: int
    failed: int


class Phase(msgspec.Struct, frozen=True):
    name: str
    start: int
    end: int
    args: Mapping[str, Any] = {}


class Timeline(msgspec.Struct):
    """Phases and events in monotonic nanoseconds of the gateway's clock."""

    phases: list[Phase]
    events: list[tuple[str, str, int, dict[str, Any]]]
    clock: str  # "shared", "wall", "durations", or "" where the engine told nothing usable
    unattributed: int

    def totals(self) -> dict[str, int]:
        """Nanoseconds spent in each phase that there was."""
        spent: dict[str, int] = {}
        for phase in self.phases:
            spent[phase.name] = spent.get(phase.name, 0) + phase.end - phase.start
        return spent


def boot_id() -> str:
    """Which boot of which machine this is: two processes with the same one share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def build(
    stamps: Stamps,
    report: EngineReport | None,
    *,
    anchor: Anchor,
    boot: str,
    failed: Sequence[FailedAttempt] = (),
) -> Timeline:
    """Merge both sides of a finished request (every stamp taken, `settled` last)."""
    events, clock = _on_gateway_clock(stamps, report, anchor, boot)
    phases = list(_arrival(stamps))
    phases += _routing(stamps, failed)
    if stamps.routed:
        phases += _engine(stamps, events)
    phases += _departure(stamps, events)
    spans = [(phase.start, phase.end) for phase in phases]
    covered = union(spans, (stamps.received, stamps.settled))
    merged: list[tuple[str, str, int, dict[str, Any]]] = [
        ("gateway", name, at, {}) for name, at in _gateway_events(stamps)
    ]
    merged += [("engine", name, at, args) for name, at, args in events]
    merged.sort(key=lambda event: event[2])
    return Timeline(phases, merged, clock, stamps.settled - stamps.received - covered)


def union(spans: Iterable[Span], window: Span) -> int:
    """Length of what the spans cover together inside the window."""
    covered, edge = 0, window[0]
    for start, end in sorted(spans):
        start, end = max(start, edge), min(end, window[1])
        if end > start:
            covered += end - start
            edge = end
    return covered


def _on_gateway_clock(
    stamps: Stamps, report: EngineReport | None, anchor: Anchor, boot: str
) -> tuple[list[Event], str]:
    if report is None or not report.events:
        return [], ""
    if report.clock == DURATIONS:
        return list(report.events), DURATIONS
    if boot and report.boot_id == boot:
        return list(report.events), "shared"
    if report.anchor is None:
        return [], ""
    offset = (report.anchor.wall_ns - report.anchor.mono_ns) - (anchor.wall_ns - anchor.mono_ns)
    mapped = [(name, at + offset, args) for name, at, args in report.events]
    low, high = stamps.received - _ABSURD_NS, stamps.settled + _ABSURD_NS
    if not all(low <= at <= high for _, at, _ in mapped):
        return [], ""
    return mapped, "wall"


def _arrival(stamps: Stamps) -> Iterator[Phase]:
    if stamps.authenticated:
        yield Phase("auth", stamps.received, stamps.authenticated)
    if stamps.body:
        yield Phase("receive", stamps.authenticated, stamps.body)
    if stamps.admitted:
        yield Phase("admission", stamps.body, stamps.admitted)


def _routing(stamps: Stamps, failed: Sequence[FailedAttempt]) -> Iterator[Phase]:
    """Choosing, and for each attempt that failed: the time it cost, then choosing again."""
    since = stamps.admitted
    if stamps.held:
        yield Phase("routing", since, stamps.held)
        yield Phase("start", stamps.held, stamps.awake)
        since = stamps.awake
    if stamps.granted:
        yield Phase("routing", since, stamps.claimed)
        yield Phase("queue", stamps.claimed, stamps.granted)
        since = stamps.granted
    elif stamps.claimed and not stamps.routed and stamps.ended == 0:
        yield Phase("routing", since, stamps.claimed)
        yield Phase("queue", stamps.claimed, stamps.delivered or stamps.settled)
        return
    for attempt in failed:
        yield Phase("routing", since, attempt.routed)
        args = {"failed": attempt.error, "replica_id": attempt.replica_id}
        yield Phase("engine", attempt.routed, attempt.failed, args)
        since = attempt.failed
    if since and stamps.routed > since:
        yield Phase("routing", since, stamps.routed)


_ENGINE_PHASES = (
    ("tokenize", "RECEIVED", "QUEUED"),
    ("engine_queue", "QUEUED", "SCHEDULED"),
    ("prefill", "SCHEDULED", "FIRST_TOKEN"),
    ("decode", "FIRST_TOKEN", "FINISHED"),
)


def _engine(stamps: Stamps, events: Sequence[Event]) -> Iterator[Phase]:
    first = _first_of(events)
    received = first.get("RECEIVED") or first.get("QUEUED")
    if received is None:
        if stamps.posted:
            yield Phase("connect", stamps.routed, stamps.posted)
            yield Phase("engine", stamps.posted, stamps.last_chunk or stamps.ended)
        return
    yield Phase("connect", stamps.routed, received[1])
    for name, begins, ends in _ENGINE_PHASES:
        begin, end = first.get(begins), first.get(ends)
        if begin is None:
            continue
        if end is None:
            # cut or broken here: what it did is known up to the last chunk that arrived
            yield Phase(name, begin[1], stamps.last_chunk or stamps.ended)
            return
        args = _prefill_args(begin, events) if name == "prefill" else {}
        yield Phase(name, begin[1], end[1], args)


def _prefill_args(scheduled: Event, events: Sequence[Event]) -> dict[str, Any]:
    parts = [[at, args.get("tokens", 0)] for name, at, args in events if name == "CHUNK"]
    return {"cached_tokens": scheduled[2].get("cached_tokens", 0), "parts": parts[:MAX_CHUNK_PARTS]}


def _departure(stamps: Stamps, events: Sequence[Event]) -> Iterator[Phase]:
    finished = _first_of(events).get("FINISHED")
    since = finished[1] if finished else stamps.last_chunk or stamps.ended
    if stamps.delivered:
        yield Phase("deliver", since or _last_before_dispatch(stamps), stamps.delivered)
    left = max(stamps.delivered, stamps.ended) or _last_before_dispatch(stamps)
    yield Phase("settle", left, stamps.settled)


def _last_before_dispatch(stamps: Stamps) -> int:
    before = (stamps.received, stamps.authenticated, stamps.body, stamps.admitted)
    return max(*before, stamps.awake, stamps.claimed, stamps.granted, stamps.routed)


def _first_of(events: Sequence[Event]) -> dict[str, Event]:
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event[0], event)
    return first


def _gateway_events(stamps: Stamps) -> Iterator[tuple[str, int]]:
    for name in stamps.__struct_fields__:
        at = getattr(stamps, name)
        if at:
            yield name.upper(), at
