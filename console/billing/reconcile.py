"""Budgets in Valkey against the ledger: a difference that lasts is corrected, one that passes is left alone.

Between a request's end and its line in the ledger lies the shipper, so Valkey is a little ahead of it while requests
flow. A difference therefore counts only when it was there, the same to the last digit, a minute before; and where
Valkey has *more* than the ledger, only if nothing was settled meanwhile. Where it has less, a request was billed that
it does not know of (a gateway died, Valkey lost its memory), and the budget would overshoot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from uuid import UUID

from django.db.models import Q

from console import coordination
from console.billing.queries import spent
from console.coordination import BudgetWindow
from console.keys.models import APIKey
from console.keys.queries import budget_windows, scope_of
from console.tenants.limits import BUDGETS, nano
from console.tenants.models import Tenant

APART_S = 55.0
"""How old a first look must be: the job runs each minute, give or take its own time."""

BATCH = 500
"""Budgets read in one call, which keeps Valkey from anything else for a millisecond."""

_HAS_BUDGET = Q(*((f"{name}__isnull", False) for name in BUDGETS), _connector=Q.OR)


@dataclass(frozen=True)
class Look:
    """What was seen of one window: Valkey's time, and nano-units spent there and in the ledger."""

    at: float
    spent: int
    ledger: int

    @property
    def drift(self) -> int:
        return self.spent - self.ledger


def is_lasting(before: Look | None, after: Look) -> bool:
    """Whether two looks at a window show a difference that nothing on its way to the ledger explains."""
    if before is None or after.drift == 0 or before.drift != after.drift or after.at - before.at < APART_S:
        return False
    return after.drift < 0 or before.spent == after.spent


@dataclass(frozen=True)
class Window:
    """A window of a budget, and whose."""

    kind: str
    scope_id: UUID
    currency: str
    budget: BudgetWindow

    def ledger(self) -> int:
        amount: Decimal = spent(self.kind, self.scope_id, self.currency, self.budget.start, self.budget.end)
        return nano(amount)


def windows(now: float) -> Iterator[Window]:
    """Every window around now of every budget that is set."""
    rows: list[Tenant | APIKey] = [*Tenant.objects.filter(_HAS_BUDGET)]
    rows += APIKey.objects.filter(_HAS_BUDGET, revoked_at=None).select_related("tenant")
    for row in rows:
        currency = row.currency if isinstance(row, Tenant) else row.tenant.currency
        for budget in budget_windows(row, now).values():
            yield Window(scope_of(row)[0], row.id, currency, budget)


def looks(found: Sequence[Window]) -> dict[str, Look]:
    """One look at each window, by name; one whose time is over by Valkey's clock is left out.

    The ledger is asked first: what settles meanwhile puts Valkey ahead, which is judged strictly.
    """
    ledger = [window.ledger() for window in found]
    reading = coordination.read([], [window.budget.name for window in found])
    return {
        window.budget.name: Look(reading.now, budget.spent, billed)
        for window, budget, billed in zip(found, reading.budgets, ledger, strict=True)
        if window.budget.holds(reading.now)
    }


def run(before: Mapping[str, Look], now: float) -> tuple[dict[str, Look], list[str]]:
    """Look at every window once. Returns the looks to compare with next time, and the names that were corrected.

    Raises coordination.Away.
    """
    kept, corrected = {}, []
    for batch in batched(windows(now), BATCH):
        for name, seen in looks(batch).items():
            earlier = before.get(name)
            if is_lasting(earlier, seen) and coordination.correct(name, seen.spent, seen.ledger):
                corrected.append(name)
            elif earlier is not None and earlier.drift == seen.drift and seen.at - earlier.at < APART_S:
                kept[name] = earlier  # too soon: the first look goes on counting
            elif seen.drift:
                kept[name] = seen
    return kept, corrected


def batched(found: Iterator[Window], size: int) -> Iterator[list[Window]]:
    """Lists of at most `size`."""
    while batch := list(islice(found, size)):
        yield batch
