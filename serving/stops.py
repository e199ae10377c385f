"""Stop strings, held in the gateway so that they work alike for every engine and never leak."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text through until a stop string completes; holds back any tail that may start one.

    The match that *completes first* wins (the longest of those completing at the same character), which is what a
    reader going character by character would see: the result does not depend on how the text was cut into chunks.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return what may be shown now. Once `matched` is set, nothing more ever is."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        found = self._first_match(pending)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return pending[:start]
        safe = self._safe_length(pending)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """The text ended without a match: what was held back is ordinary text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = pending.find(stop)
            if start >= 0:
                match = (start + len(stop), start, stop)
                best = match if best is None else min(best, match)
        return None if best is None else (best[1], best[2])

    def _safe_length(self, pending: str) -> int:
        """Where the longest tail begins that is a proper prefix of some stop string."""
        safe = len(pending)
        for stop in self._stops:
            start = pending.find(stop[0], max(0, len(pending) - len(stop) + 1))
            while 0 <= start < safe:
                if stop.startswith(pending[start:]):
                    safe = start
                    break
                start = pending.find(stop[0], start + 1)
        return safe
