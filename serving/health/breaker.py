"""A circuit breaker for one launch of one replica."""

from __future__ import annotations

from enum import StrEnum

from serving.health.outcome import FAULT, OK
from serving.health.window import Window

CONSECUTIVE = 5
WINDOW_S = 10
WINDOW_SHARE, WINDOW_LEAST = 0.5, 20
OPEN_S, OPEN_MAX_S = 1.0, 30.0
FORGIVEN_S = 60.0  # an opening this long after the last one is counted as the first again
PROBE_S = 30.0  # a probe that told nothing by then is taken for lost


class State(StrEnum):
    """closed → open (faults) → half-open (time) → closed (a probe went well) or open (it did not: twice as long)."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Opens after CONSECUTIVE faults, or when at least half of 20 or more attempts within 10 s were faults."""

    def __init__(self) -> None:
        self._open = False
        self._until = 0.0
        self._openings = 0
        self._consecutive = 0
        self._window = Window(WINDOW_S)  # all, faults
        self._probing_since: float | None = None

    def state(self, now: float) -> State:
        if not self._open:
            return State.CLOSED
        return State.OPEN if now < self._until else State.HALF_OPEN

    def verdict(self, now: float) -> str:
        """Empty if an attempt may be made. A half-open breaker lets one probe through at a time."""
        if not self._open:
            return ""
        if now < self._until:
            return "breaker open"
        if self._probing_since is not None and now - self._probing_since < PROBE_S:
            return "breaker half-open, a probe is on its way"
        return ""

    def begin(self, now: float) -> None:
        """An attempt is made."""
        if self._open and now >= self._until:
            self._probing_since = now

    def note(self, outcome: str, now: float, jitter: float) -> str:
        """An attempt ended. Returns the reason if the breaker opened or closed by it, "" else.

        `jitter` in [0, 1) spreads the end of the opening over half of its length, so that processes probe one by one.
        """
        if outcome == FAULT:
            return self._fault(now, jitter)
        if self._open:
            return self._probe_ended(outcome, now)
        if outcome == OK:
            self._consecutive = 0
            self._window.note(now, 1, 0)
        return ""

    def _fault(self, now: float, jitter: float) -> str:
        if self.state(now) is State.OPEN:
            return ""  # of an attempt from before
        self._consecutive += 1
        self._window.note(now, 1, 1)
        reason = self._why_open(now)
        if reason:
            self._openings = 1 if now - self._until > FORGIVEN_S else self._openings + 1
            length = min(OPEN_S * 2 ** (self._openings - 1), OPEN_MAX_S)
            self._open, self._until, self._probing_since = True, now + length * (1 - jitter / 2), None
        return reason

    def _why_open(self, now: float) -> str:
        if self._open:
            return "the probe failed"
        if self._consecutive >= CONSECUTIVE:
            return f"{self._consecutive} faults in a row"
        every, faults = self._window.counts(now)
        if every >= WINDOW_LEAST and faults >= WINDOW_SHARE * every:
            return f"{faults} faults in {every} attempts within {WINDOW_S} s"
        return ""

    def _probe_ended(self, outcome: str, now: float) -> str:
        if now < self._until:
            return ""  # of an attempt from before
        self._probing_since = None
        if outcome != OK:
            return ""
        self._open, self._until, self._consecutive = False, now, 0
        self._window.clear()
        return "the probe went well"
