"""Where the shipper delivers: ledger and telemetry rows, idempotent by request id, one transaction per batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
from django.db import DataError, IntegrityError, connection, models, transaction

from console.billing.models import UsageRecord as UsageRow
from console.errors import first_line
from console.telemetry import partitions
from console.telemetry.models import RequestRecord as RecordRow
from serving.port import RecordRefused, RequestContent, RequestDetail, RequestRecord, Settled, UsageRecord

_RECORD_FIELDS = RequestRecord.__struct_fields__
_USAGE_FIELDS = UsageRecord.__struct_fields__
_COLUMNS = frozenset(("id", "started_at", "tenant_id"))  # of a row that is otherwise one document
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # JSON's escape, unless its backslash is itself escaped

Limits = dict[str, int]


def _limits(model: type[models.Model]) -> Limits:
    """The longest text, or the largest number, by column."""
    found = {field.name: _limit(field) for field in model._meta.concrete_fields}
    return {name: limit for name, limit in found.items() if limit is not None}


def _limit(field: models.Field[Any, Any]) -> int | None:
    if isinstance(field, models.IntegerField):
        return connection.ops.integer_field_range(field.get_internal_type())[1]
    return field.max_length if isinstance(field, models.CharField) else None


class DatabaseSink:
    """serving.port.RecordSink over PostgreSQL."""

    def __init__(self) -> None:
        self._days: set[date] = set()
        self._usage_limits, self._record_limits = _limits(UsageRow), _limits(RecordRow)

    def write(self, batch: Sequence[Settled]) -> None:
        """Insert what is not there yet. Raises RecordRefused or a database error when nothing was written."""
        try:
            self._write(batch)
        except IntegrityError:
            self._days.clear()  # a partition may have been dropped since: look again
            try:
                self._write(batch)
            except IntegrityError as error:
                raise RecordRefused(first_line(error)) from error

    def _write(self, batch: Sequence[Settled]) -> None:
        try:
            self._ensure_partitions(batch)
            self._insert(batch)
        except (DataError, ValueError) as error:
            raise RecordRefused(first_line(error)) from error

    def _insert(self, batch: Sequence[Settled]) -> None:
        usage = [_row(s.usage, self._usage_limits) for s in batch if s.usage]
        records = [_row(s.record, self._record_limits) for s in batch]
        details = [_body_row(s.detail) for s in batch]
        contents = [_body_row(s.content) | {"tenant_id": s.content.tenant_id} for s in batch if s.content]
        with transaction.atomic(), connection.cursor() as cursor:
            _insert(cursor, "billing_usagerecord", _USAGE_FIELDS, usage)
            _insert(cursor, "telemetry_requestrecord", _RECORD_FIELDS, records)
            _insert(cursor, "telemetry_requestdetail", ("id", "started_at", "body"), details)
            _insert(cursor, "telemetry_requestcontent", ("id", "started_at", "tenant_id", "body"), contents)

    def _ensure_partitions(self, batch: Sequence[Settled]) -> None:
        """A record can arrive days late, after a long time without a database."""
        for day in {_when(s.record.started_at).date() for s in batch} - self._days:
            partitions.ensure_for(day)
            self._days.add(day)


def _insert(cursor: Any, table: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """One parameter for all rows: binding each value by itself was most of what the shipper did."""
    if not rows:
        return
    names = ",".join(columns)
    cursor.execute(
        f"INSERT INTO {table} ({names}) SELECT {names} FROM json_populate_recordset(NULL::{table}, %s::json)"  # noqa: S608 names are ours
        " ON CONFLICT DO NOTHING",
        [msgspec.json.encode(rows).decode()],
    )


def _row(struct: UsageRecord | RequestRecord, limits: Limits) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(struct)
    for name, limit in limits.items():
        value = row.get(name)
        if value is not None:
            row[name] = _fitted(value, limit)
    row["started_at"] = _when(struct.started_at)
    row["cost"] = Decimal(struct.cost).scaleb(-9)  # exact: whole nano-units
    return row


def _body_row(struct: RequestDetail | RequestContent) -> dict[str, Any]:
    body = {name: value for name, value in msgspec.to_builtins(struct).items() if name not in _COLUMNS}
    encoded = msgspec.json.encode(body)
    if b"\\u0000" in encoded:
        encoded = _NUL.sub("\\1\ufffd", encoded.decode()).encode()
    return {"id": struct.id, "started_at": _when(struct.started_at), "body": msgspec.Raw(encoded)}


def _fitted(value: Any, limit: int) -> Any:
    """As much of a value as its column holds: clients and engines choose some, and one must not stop all others."""
    if isinstance(value, str):
        if "\0" in value:
            value = value.replace("\0", "\ufffd")  # PostgreSQL's text cannot hold NUL; a client's header can
        return value[:limit]
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-limit, min(value, limit))
    return value


def _when(seconds: float) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OSError, OverflowError) as error:  # what the C library says of a moment beyond every calendar
        raise ValueError(f"{seconds} is no moment") from error
