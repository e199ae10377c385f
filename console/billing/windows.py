"""The windows of budgets: calendar hours, days and months of a tenant's billing zone, and all of time."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime


def window_start(window: str, zone: str, now: datetime) -> datetime:
    """When the window that holds `now` began, in UTC; for "total" the beginning of time."""
    if window == "total":
        return datetime.min.replace(tzinfo=UTC)
    local = now.astimezone(zoneinfo.ZoneInfo(zone))
    start = local.replace(minute=0, second=0, microsecond=0)
    if window in {"day", "month"}:
        start = start.replace(hour=0, fold=0)
    if window == "month":
        start = start.replace(day=1)
    return start.astimezone(UTC)
