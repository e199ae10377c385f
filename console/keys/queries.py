"""Reads about limits: each one with what is used of it now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from django.utils.translation import gettext as _

from console import coordination
from console.billing.queries import spent
from console.coordination import BudgetWindow
from console.keys.models import APIKey
from console.tenants.limits import BUDGETS, LIMITS
from console.tenants.models import Tenant
from serving.port import NANO


@dataclass(frozen=True)
class Use:
    """What is used of one limit. Money that is reserved for running requests is not in `used`."""

    used: Decimal
    reserved: Decimal = Decimal(0)


@dataclass(frozen=True)
class LimitRow:
    """One limit of a page. `use` is None where it is not known now."""

    name: str
    title: str
    limit: Decimal
    is_money: bool
    use: Use | None

    @property
    def share(self) -> float | None:
        """Used and reserved against the limit; a limit of 0 is always used up."""
        if self.use is None:
            return None
        return float((self.use.used + self.use.reserved) / self.limit) if self.limit else 1.0


def limit_rows(row: Tenant | APIKey, now: float | None = None) -> list[LimitRow]:
    """Every limit that is set for a tenant or a key, with its use."""
    live = live_use(row, now)
    found = []
    for name in LIMITS:
        limit = getattr(row, name)
        if limit is not None:
            use = live.get(name) if live is not None else _from_ledger(row, name, now)
            found.append(LimitRow(name, limit_title(name), Decimal(limit), name in BUDGETS, use))
    return found


def live_use(row: Tenant | APIKey, now: float | None = None) -> Mapping[str, Use] | None:
    """What gateways count at this moment, by limit; None while Valkey is away."""
    windows = budget_windows(row, now)
    try:
        reading = coordination.read([scope_of(row)], [window.name for window in windows.values()])
    except coordination.Away:
        return None
    (rates,) = reading.scopes
    found = {
        "requests_per_minute": Use(Decimal(rates.requests)),
        "tokens_per_minute": Use(Decimal(rates.input_tokens + rates.output_tokens)),
        "input_tokens_per_minute": Use(Decimal(rates.input_tokens)),
        "output_tokens_per_minute": Use(Decimal(rates.output_tokens)),
        "concurrency": Use(Decimal(rates.concurrency)),
    }
    money = zip(windows, reading.budgets, strict=True)
    return found | {name: Use(_amount(budget.spent), _amount(budget.reserved)) for name, budget in money}


def scope_of(row: Tenant | APIKey) -> tuple[str, str]:
    """Kind and id, as gateways name whose limits they count."""
    return ("tenant" if isinstance(row, Tenant) else "key", str(row.id))


def budget_windows(row: Tenant | APIKey, now: float | None = None) -> dict[str, BudgetWindow]:
    """The windows around now of the budgets that are set, by column."""
    tenant = row if isinstance(row, Tenant) else row.tenant
    at = time.time() if now is None else now
    found = coordination.budget_windows(*scope_of(row), row.limits(), tenant.currency, tenant.billing_zone, at)
    return {f"budget_{window}": each for window, each in found.items()}


def _from_ledger(row: Tenant | APIKey, name: str, now: float | None) -> Use | None:
    """What is spent stands in the ledger too; what is used of a rate stands nowhere else."""
    window = budget_windows(row, now).get(name)
    if window is None:
        return None
    tenant = row if isinstance(row, Tenant) else row.tenant
    return Use(spent(scope_of(row)[0], row.id, tenant.currency, window.start, window.end))


def _amount(nano_units: int) -> Decimal:
    return Decimal(nano_units) / NANO


def limit_title(name: str) -> str:
    return {
        "requests_per_minute": _("Requests a minute"),
        "tokens_per_minute": _("Tokens a minute"),
        "input_tokens_per_minute": _("Input tokens a minute"),
        "output_tokens_per_minute": _("Output tokens a minute"),
        "concurrency": _("Requests at once"),
        "budget_hour": _("Budget an hour"),
        "budget_day": _("Budget a day"),
        "budget_month": _("Budget a month"),
        "budget_total": _("Budget in total"),
    }[name]


def limit_fields(row: Tenant | APIKey) -> list[tuple[str, str, str]]:
    """Name, title and value of each limit's field in a form."""
    values = ((name, getattr(row, name)) for name in LIMITS)
    return [
        (name, limit_title(name), "" if value is None else f"{Decimal(value).normalize():f}") for name, value in values
    ]
