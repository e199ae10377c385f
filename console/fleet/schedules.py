"""Known hours with bounds of their own: "nobody works at night", "the batch comes on Sundays".

As JSON: {"days": ["mon", …], "from": "22:00", "to": "06:00", "zone": "Europe/Berlin", "min": 0, "max": 1}. The days
are those on which it begins; where `to` is not after `from` it ends on the day after. The first that holds counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MOST = 20  # schedules of one deployment
MOST_REPLICAS = 1000
_KEYS = frozenset(("days", "from", "to", "zone", "min", "max"))
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class Schedule:
    """Bounds that hold on some days between two times. `begin` and `end` are minutes after midnight in `zone`."""

    days: frozenset[int]  # 0 is Monday
    begin: int
    end: int
    zone: str
    least: int
    most: int

    @property
    def told(self) -> str:
        """As a sentence calls it."""
        days = ", ".join(DAYS[day] for day in sorted(self.days)) if len(self.days) < 7 else "every day"
        return f"the schedule {days} {_clock(self.begin)}–{_clock(self.end)} {self.zone}"

    def holds(self, at: float) -> bool:
        """Whether it holds at a moment (unix seconds)."""
        local = datetime.fromtimestamp(at, ZoneInfo(self.zone))
        minute, today = local.hour * 60 + local.minute, local.weekday()
        yesterday = (local - timedelta(days=1)).weekday()
        if self.begin < self.end:
            return today in self.days and self.begin <= minute < self.end
        return (today in self.days and minute >= self.begin) or (yesterday in self.days and minute < self.end)


def active(schedules: Iterable[Schedule], at: float) -> Schedule | None:
    """The first schedule that holds at a moment (unix seconds)."""
    return next((schedule for schedule in schedules if schedule.holds(at)), None)


def schedule_of(value: Any) -> Schedule:
    """Read one schedule. Raises ValueError with what is wrong with it."""
    if not isinstance(value, Mapping) or set(value) != _KEYS:
        raise ValueError(f"must have exactly {', '.join(sorted(_KEYS))}")
    days = value["days"]
    if not isinstance(days, list) or not 0 < len(days) <= len(DAYS) or not all(day in DAYS for day in days):
        raise ValueError(f"needs days out of {', '.join(DAYS)}")
    least, most = value["min"], value["max"]
    if not (_is_count(least) and _is_count(most) and least <= most):
        raise ValueError(f"needs whole numbers min and max, 0 ≤ min ≤ max ≤ {MOST_REPLICAS}")
    return Schedule(
        days=frozenset(DAYS.index(day) for day in days),
        begin=_minutes(value["from"]),
        end=_minutes(value["to"]),
        zone=_zone(value["zone"]),
        least=least,
        most=most,
    )


def schedules_of(value: Any) -> tuple[Schedule, ...]:
    """Read a deployment's schedules. Raises ValueError with the number of the one that is wrong."""
    if not isinstance(value, list) or len(value) > MOST:
        raise ValueError(f"must be a list of at most {MOST} schedules")
    found = []
    for number, each in enumerate(value, 1):
        try:
            found.append(schedule_of(each))
        except ValueError as error:
            raise ValueError(f"{error} (schedule {number})") from None
    return tuple(found)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_REPLICAS


def _minutes(value: Any) -> int:
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("needs times like 22:00")
    return int(match[1]) * 60 + int(match[2])


def _zone(value: Any) -> str:
    """Names only: a path would be looked up below the folder of zones."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_+-]{1,30}(/[A-Za-z0-9_+-]{1,30}){0,2}", value):
        raise ValueError("needs a time zone such as Europe/Berlin")
    try:
        ZoneInfo(value)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"knows no time zone {value}") from None
    return value


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"
