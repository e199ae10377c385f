"""Reads about limits: each one with what is used of it now."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.utils import timezone
from django.utils.translation import gettext as _

from console.billing.queries import spent
from console.billing.windows import window_start
from console.keys.models import APIKey
from console.tenants.limits import BUDGETS, LIMITS
from console.tenants.models import Tenant


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


def limit_rows(row: Tenant | APIKey, now: datetime | None = None) -> list[LimitRow]:
    """Every limit that is set for a tenant or a key, with its use."""
    now = now or timezone.now()
    tenant = row if isinstance(row, Tenant) else row.tenant
    kind = "tenant" if isinstance(row, Tenant) else "key"
    live = live_use(kind, row.id)
    found = []
    for name in LIMITS:
        limit = getattr(row, name)
        if limit is None:
            continue
        use = live.get(name) if live is not None else None
        if use is None and name in BUDGETS:
            start = window_start(name.removeprefix("budget_"), tenant.billing_zone, now)
            use = Use(spent(kind, row.id, tenant.currency, start))
        found.append(LimitRow(name, limit_title(name), Decimal(limit), name in BUDGETS, use))
    return found


def live_use(kind: str, scope_id: uuid.UUID) -> Mapping[str, Use] | None:
    """What gateways count at this moment, by limit; None while nobody can tell."""
    return None


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
