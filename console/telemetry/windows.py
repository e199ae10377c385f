"""Time windows of pages, and the time inside a request id. No telemetry is read without a window."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from urllib.parse import urlencode

RANGES = {
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "6h": timedelta(hours=6),
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
}
DEFAULT = "1h"
LONGEST = timedelta(days=31)
_BUCKETS = {"15m": 15, "1h": 60, "6h": 300, "24h": 900, "7d": 7200}  # seconds of one bar


@dataclass(frozen=True)
class Window:
    """A span of time: one of RANGES ending now, or a custom one. `start` is inside, `end` is not."""

    start: datetime
    end: datetime
    key: str = DEFAULT  # a key of RANGES, or "custom"
    problem: str = ""  # why what was asked for could not be used

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()

    @property
    def bucket_s(self) -> int:
        """Width of one bar of a chart: 60 to 96 bars a window."""
        if self.key in _BUCKETS:
            return _BUCKETS[self.key]
        return max(1, round(self.seconds / 72))

    @property
    def query(self) -> str:
        """The window as it stands in a URL."""
        if self.key in RANGES:
            return urlencode({"range": self.key})
        return urlencode({"from": self.start.isoformat(), "to": self.end.isoformat()})


def latest(key: str = DEFAULT, now: datetime | None = None) -> Window:
    """The window of that length that ends now."""
    end = now or datetime.now(UTC)
    return Window(end - RANGES[key], end, key)


def parse(key: str, start: str, end: str, zone: tzinfo = UTC, now: datetime | None = None) -> Window:
    """Read a window from a URL; what cannot be used falls back to the default and says why.

    Custom times without an offset are in `zone`, the viewer's.
    """
    now = now or datetime.now(UTC)
    if not start and not end:
        return latest(key if key in RANGES else DEFAULT, now)
    try:
        last = _moment(end, zone) if end else now
        first = _moment(start, zone) if start else last - RANGES[DEFAULT]
    except ValueError:
        return _fallback("bad-time", now)
    if first >= last:
        return _fallback("empty", now)
    if last - first > LONGEST:
        return Window(last - LONGEST, last, "custom", "too-long")
    return Window(first, last, "custom")


def stamp(request_id: uuid.UUID) -> datetime | None:
    """The millisecond at which a UUIDv7 was made; None for any other UUID or a date nobody can have."""
    if request_id.version != 7:
        return None
    ms = request_id.int >> 80
    if ms >= 253_402_300_800_000:  # year 10000
        return None
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


def _moment(text: str, zone: tzinfo) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=zone)


def _fallback(problem: str, now: datetime) -> Window:
    return Window(now - RANGES[DEFAULT], now, DEFAULT, problem)
