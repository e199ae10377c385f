"""Day partitions of the telemetry tables: made a week ahead, dropped when their time is over."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta

from django.conf import settings
from django.db import connection

TABLES = ("telemetry_requestrecord", "telemetry_requestdetail", "telemetry_enginespan")
AHEAD_DAYS = 7


def ensure(days_back: int = 1, today: date | None = None) -> None:
    """Make the partitions from `days_back` days ago to a week ahead that do not exist yet."""
    today = today or datetime.now(UTC).date()
    days = [today + timedelta(days=offset) for offset in range(-days_back, AHEAD_DAYS + 1)]
    for day in days:
        ensure_for(day)


def ensure_for(day: date) -> None:
    """Make the partitions of one day where they are missing; by itself for a record that arrives late."""
    with connection.cursor() as cursor:
        for table in TABLES:
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {_name(table, day)} PARTITION OF {table}"
                f" FOR VALUES FROM ('{day}') TO ('{day + timedelta(days=1)}')"
            )


def drop_old(today: date | None = None) -> list[str]:
    """Drop partitions past their retention; returns their names."""
    today = today or datetime.now(UTC).date()
    keep = dict.fromkeys(TABLES, settings.ENV["DETAIL_DAYS"]) | {TABLES[0]: settings.ENV["RECORD_DAYS"]}
    dropped = []
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.relname, p.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
            " JOIN pg_class p ON p.oid = i.inhparent WHERE p.relname = ANY(%s)",
            [list(TABLES)],
        )
        for name, table in cursor.fetchall():
            match = re.search(r"_(\d{4})(\d\d)(\d\d)$", name)
            if match and date(*map(int, match.groups())) < today - timedelta(days=keep[table]):
                cursor.execute(f"DROP TABLE {name}")
                dropped.append(name)
    return dropped


def _name(table: str, day: date) -> str:
    return f"{table}_{day:%Y%m%d}"
