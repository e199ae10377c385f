"""What gateways share in Valkey, for pages and jobs: how much of each limit is used, and correcting what was spent.

The console's one door to serving.coordination. Pages and jobs run in threads without a loop: each question makes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from django.conf import settings

from serving.coordination import readings, wire
from serving.coordination.calendar import Calendar
from serving.coordination.contract import Scope
from serving.coordination.readings import Readings
from serving.coordination.valkey import Away
from serving.port import Limits

__all__ = ["Away", "BudgetWindow", "Readings", "budget_windows", "correct", "read"]


@dataclass(frozen=True)
class BudgetWindow:
    """One window of one budget: its name in Valkey, and its time in seconds since the epoch (0, 0: all of it)."""

    name: str
    start: int
    end: int

    def holds(self, now: float) -> bool:
        return self.end == 0 or self.start <= now < self.end


def budget_windows(
    kind: str, scope_id: str, limits: Limits, currency: str, zone: str, now: float
) -> dict[str, BudgetWindow]:
    """The windows around `now` of a key's or tenant's budgets, by "hour", "day", "month", "total"."""
    found = wire.budgets(Scope(kind, scope_id, limits), currency, zone, Calendar(), now)
    return {window: BudgetWindow(name, start, end) for name, window, _amount, start, end in found}


def read(scopes: Sequence[tuple[str, str]], budgets: Sequence[str] = ()) -> Readings:
    """The use of each (kind, id) and each named budget, in one look. Raises Away."""
    return asyncio.run(readings.read(settings.VALKEY_URL, scopes, budgets))


def correct(name: str, seen: int, right: int) -> bool:
    """Set what a budget's window has spent, if it still is what was seen. Raises Away."""
    return asyncio.run(readings.correct(settings.VALKEY_URL, name, read=seen, right=right))
