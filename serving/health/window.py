"""Two counts over the last seconds."""

from __future__ import annotations

from collections import deque


class Window:
    """Counts of two kinds of events within the last `seconds`, in one bucket a second."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._buckets: deque[list[int]] = deque()  # [at, first, second]
        self._totals = [0, 0]

    def note(self, now: float, first: int, second: int) -> None:
        self._forget(now)
        at = int(now)
        if not self._buckets or self._buckets[-1][0] != at:
            self._buckets.append([at, 0, 0])
        for place, count in enumerate((first, second)):
            self._buckets[-1][place + 1] += count
            self._totals[place] += count

    def counts(self, now: float) -> tuple[int, int]:
        self._forget(now)
        return self._totals[0], self._totals[1]

    def clear(self) -> None:
        self._buckets.clear()
        self._totals = [0, 0]

    def _forget(self, now: float) -> None:
        oldest = int(now) - self._seconds
        while self._buckets and self._buckets[0][0] <= oldest:
            _, first, second = self._buckets.popleft()
            self._totals[0] -= first
            self._totals[1] -= second
