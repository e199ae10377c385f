"""Where the shipper delivers: ledger and telemetry rows, idempotent by request id, one transaction per batch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import msgspec
from django.db import connection, transaction

from console.telemetry import partitions
from serving.port import RequestDetail, RequestRecord, Settled, UsageRecord

_RECORD_FIELDS = RequestRecord.__struct_fields__
_USAGE_FIELDS = UsageRecord.__struct_fields__


class DatabaseSink:
    """serving.port.RecordSink over PostgreSQL."""

    def __init__(self) -> None:
        self._days: set[date] = set()

    def write(self, batch: Sequence[Settled]) -> None:
        """Insert what is not there yet. Raises a database error when nothing was written."""
        self._ensure_partitions(batch)
        with transaction.atomic(), connection.cursor() as cursor:
            _insert(
                cursor,
                "billing_usagerecord",
                _USAGE_FIELDS,
                [_row(s.usage) for s in batch if s.usage],
            )
            _insert(
                cursor, "telemetry_requestrecord", _RECORD_FIELDS, [_row(s.record) for s in batch]
            )
            _insert(
                cursor,
                "telemetry_requestdetail",
                ("id", "started_at", "body"),
                [_detail_row(s.detail) for s in batch],
            )

    def _ensure_partitions(self, batch: Sequence[Settled]) -> None:
        """A record can arrive days late, after a long time without a database."""
        for day in {_when(s.record.started_at).date() for s in batch} - self._days:
            partitions.ensure_for(day)
            self._days.add(day)


def _insert(cursor: Any, table: str, columns: Sequence[str], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    marks = ",".join(["%s"] * len(columns))
    values = ",".join([f"({marks})"] * len(rows))
    cursor.execute(
        f"INSERT INTO {table} ({','.join(columns)}) VALUES {values} ON CONFLICT DO NOTHING",  # noqa: S608 names are ours
        [value for row in rows for value in row],
    )


def _row(struct: UsageRecord | RequestRecord) -> tuple[Any, ...]:
    values = [_clean(getattr(struct, name)) for name in struct.__struct_fields__]
    values[struct.__struct_fields__.index("started_at")] = _when(struct.started_at)
    return tuple(values)


def _detail_row(detail: RequestDetail) -> tuple[Any, ...]:
    body = msgspec.to_builtins(detail)
    del body["id"], body["started_at"]
    return (
        detail.id,
        _when(detail.started_at),
        msgspec.json.encode(body).decode().replace("\\u0000", "\ufffd"),
    )


def _clean(value: Any) -> Any:
    """PostgreSQL's text cannot hold NUL; a client's header can."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
