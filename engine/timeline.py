"""What happened to one request, in order, on the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_EVENTS = 256


class TimelineEvent(NamedTuple):
    """A point in a request's life; `mono_ns` is CLOCK_MONOTONIC of this machine."""

    name: str
    mono_ns: int
    args: Mapping[str, Any]


class Timeline:
    """A bounded list of events; what does not fit is counted, not kept.

    The event loop and the step thread both append. list.append is atomic, and `as_list` sorts, so
    no lock is needed.
    """

    __slots__ = ("_events", "dropped")

    def __init__(self) -> None:
        self._events: list[TimelineEvent] = []
        self.dropped = 0

    def note(self, name: str, *, at: int | None = None, **args: Any) -> None:
        """Append an event, stamped now unless `at` (monotonic ns) is given."""
        if len(self._events) >= MAX_EVENTS and name != "FINISHED":
            self.dropped += 1
            return
        self._events.append(TimelineEvent(name, time.monotonic_ns() if at is None else at, args))

    def at(self, name: str) -> int | None:
        """Monotonic ns of the first event of that name."""
        return next((event.mono_ns for event in self._events if event.name == name), None)

    def as_list(self) -> list[list[Any]]:
        """`[[name, mono_ns, args], …]` in time order, as sent to the gateway."""
        return [list(event) for event in sorted(self._events, key=lambda event: event.mono_ns)]
