"""Reads of the usage ledger."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import Max, Sum
from django.db.models.functions import TruncDay

from console.billing.models import UsageRecord

DAYS = 7


@dataclass
class KeyUsage:
    """What one key used in the last DAYS days. `by_day` is requests a day, oldest first."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: Decimal = Decimal(0)  # in the tenant's currency
    last_used: datetime | None = None
    by_day: list[int] = field(default_factory=lambda: [0] * DAYS)


def usage_by_key(tenant_id: uuid.UUID, now: datetime | None = None) -> dict[uuid.UUID, KeyUsage]:
    """Requests and tokens of a tenant's keys, by key id; days are UTC."""
    first = _first_day(now)
    rows = (
        UsageRecord.objects.filter(tenant_id=tenant_id, started_at__gte=first)
        .annotate(day=TruncDay("started_at", tzinfo=UTC))
        .values("key_id", "day")
        .annotate(
            n=Sum("requests"),
            prompt=Sum("prompt_tokens"),
            cached=Sum("cached_tokens"),
            completion=Sum("completion_tokens"),
            cost=Sum("cost"),
            last=Max("started_at"),
        )
    )
    usage: dict[uuid.UUID, KeyUsage] = {}
    for row in rows:
        key = usage.setdefault(row["key_id"], KeyUsage())
        key.requests += row["n"]
        key.prompt_tokens += row["prompt"]
        key.cached_tokens += row["cached"]
        key.completion_tokens += row["completion"]
        key.cost += row["cost"]
        key.last_used = max(filter(None, [key.last_used, row["last"]]))
        day = (row["day"] - first).days
        if 0 <= day < DAYS:
            key.by_day[day] = row["n"]
    return usage


def usage_by_model(tenant_id: uuid.UUID, now: datetime | None = None) -> Iterable[Mapping[str, Any]]:
    """Requests and tokens of a tenant by model over the same days, the most used first."""
    first = _first_day(now)
    return (
        UsageRecord.objects.filter(tenant_id=tenant_id, started_at__gte=first)
        .values("model")
        .annotate(
            n=Sum("requests"),
            prompt=Sum("prompt_tokens"),
            cached=Sum("cached_tokens"),
            completion=Sum("completion_tokens"),
            cost=Sum("cost"),
        )
        .order_by("-n")[:20]
    )


def _first_day(now: datetime | None) -> datetime:
    """When the last DAYS days began, today's the last of them."""
    now = now or datetime.now(UTC)
    return (now - timedelta(days=DAYS - 1)).replace(hour=0, minute=0, second=0, microsecond=0)


def spent(kind: str, scope_id: uuid.UUID, currency: str, start: int, end: int) -> Decimal:
    """What a key's or tenant's requests received in a window (seconds; 0, 0: ever) have cost, from the ledger."""
    lines = UsageRecord.objects.filter(**{f"{kind}_id": scope_id}, currency=currency)
    if end:
        since, until = (datetime.fromtimestamp(at, UTC) for at in (start, end))
        lines = lines.filter(started_at__gte=since, started_at__lt=until)
    return lines.aggregate(sum=Sum("cost"))["sum"] or Decimal(0)
