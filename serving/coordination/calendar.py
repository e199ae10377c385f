"""When the windows of budgets begin and end: hours, days and months of a tenant's billing zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

KEPT = 10_000


def bounds(window: str, zone: str, now: float) -> tuple[int, int]:
    """Seconds since the epoch at which the window around `now` begins and ends; (0, 0) for "total".

    A zone that this machine does not know counts as UTC: a limit that is an hour off beats none.
    """
    if window == "total":
        return 0, 0
    try:
        place = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        place = ZoneInfo("UTC")
    local = datetime.fromtimestamp(now, UTC).astimezone(place)
    if window == "hour":
        # counted in elapsed time: where clocks are put back, the repeated hour is a window of its own
        into = timedelta(minutes=local.minute, seconds=local.second, microseconds=local.microsecond)
        start = int((local.astimezone(UTC) - into).timestamp())
        return start, start + 3600
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if window == "day":
        return int(midnight.timestamp()), int((midnight + timedelta(days=1)).timestamp())
    first = midnight.replace(day=1)
    return int(first.timestamp()), int((first + timedelta(days=32)).replace(day=1).timestamp())


class Calendar:
    """`bounds`, remembered while a window lasts."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[int, int]] = {}

    def window(self, window: str, zone: str, now: float) -> tuple[int, int]:
        kept = self._kept.get((window, zone))
        if kept and (kept[0] <= now < kept[1] or window == "total"):
            return kept
        if len(self._kept) >= KEPT:
            self._kept.clear()
        found = bounds(window, zone, now)
        self._kept[window, zone] = found
        return found
