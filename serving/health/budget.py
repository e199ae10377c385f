"""How many attempts may be second ones."""

from __future__ import annotations

from serving.health.window import Window

SHARE = 0.2
WINDOW_S = 10
FLOOR = 10  # retries within a window that are always allowed, or little traffic could not retry at all


class RetryBudget:
    """Retries within 10 s are at most 20 % of the requests: when everything fails, retries must not add to it."""

    def __init__(self) -> None:
        self._window = Window(WINDOW_S)  # attempts, retries among them

    def attempted(self, now: float) -> None:
        """An attempt is made, a first one or a retry that was allowed."""
        self._window.note(now, 1, 0)

    def may_retry(self, now: float) -> bool:
        """Whether one more retry is within the budget; if so, it is spent."""
        attempts, retries = self._window.counts(now)
        if retries + 1 > max(FLOOR, SHARE * (attempts - retries)):
            return False
        self._window.note(now, 0, 1)
        return True
