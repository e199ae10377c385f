"""What a key or a tenant may use: the columns that both have, their checks, and the struct that gateways get."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from console.base.fields import Check, money, optional, whole
from serving.port import NANO, PRIORITIES, Budget, Limits

RATES = (
    "requests_per_minute",
    "tokens_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "concurrency",
)
WINDOWS = ("hour", "day", "month", "total")
BUDGETS = tuple(f"budget_{window}" for window in WINDOWS)
LIMITS = (*RATES, *BUDGETS)
LARGEST_BUDGET = 9_000_000  # of a currency: as nano-units it is still exact in Valkey's doubles
LARGEST_RATE = 2_000_000_000

CHECKS: Mapping[str, Check] = {
    **{name: optional(whole(0, LARGEST_RATE)) for name in RATES},
    **{name: optional(money(LARGEST_BUDGET, 9)) for name in BUDGETS},
}


class Priority(models.TextChoices):
    """Classes of a queue: one is served before those below it."""

    HIGH = "high", _("High")
    NORMAL = "normal", _("Normal")
    LOW = "low", _("Low")


def _rate() -> models.PositiveIntegerField[int | None, int | None]:
    return models.PositiveIntegerField(null=True, blank=True)


def _budget() -> models.DecimalField[Decimal | None, Decimal | None]:
    return models.DecimalField(max_digits=18, decimal_places=9, null=True, blank=True)


class Limited(models.Model):
    """Limits as columns; None: no such limit. Rates hold in any 60 seconds, budgets in windows of the billing zone."""

    requests_per_minute = _rate()
    tokens_per_minute = _rate()
    input_tokens_per_minute = _rate()
    output_tokens_per_minute = _rate()
    concurrency = _rate()
    budget_hour = _budget()
    budget_day = _budget()
    budget_month = _budget()
    budget_total = _budget()

    class Meta:
        abstract = True

    def limits(self) -> Limits:
        """As gateways get them."""
        return limits_of({name: getattr(self, name) for name in LIMITS})


def limits_of(row: Mapping[str, Any], prefix: str = "") -> Limits:
    """A row's columns, named with `prefix`, as the struct."""
    budgets = ((window, row[f"{prefix}budget_{window}"]) for window in WINDOWS)
    return Limits(
        **{name: row[prefix + name] for name in RATES},
        budgets=tuple(Budget(window, nano(amount)) for window, amount in budgets if amount is not None),
    )


def nano(amount: Decimal) -> int:
    """An amount of money in whole nano-units."""
    return int(amount * NANO)


def lower(key_priority: str, tenant_priority: str) -> str:
    """The class a key is served in: its own, but never one above its tenant's. An empty one means the tenant's."""
    return max(key_priority or tenant_priority, tenant_priority, key=PRIORITIES.index)
