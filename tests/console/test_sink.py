"""Ledger and telemetry rows: once per request id, late ones too, whatever bytes a client sent."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import msgspec
import pytest
import uuid_utils
from django.db import IntegrityError, connection, transaction

from console.billing.models import UsageRecord as UsageRow
from console.telemetry import partitions
from console.telemetry.models import RequestDetail as DetailRow
from console.telemetry.models import RequestRecord as RecordRow
from console.telemetry.sink import DatabaseSink
from serving.port import RecordRefused, RequestDetail, RequestRecord, Settled, UsageRecord

pytestmark = pytest.mark.django_db

TENANT, KEY = str(uuid4()), str(uuid4())


def settled(at: float | None = None, **record: object) -> Settled:
    started = at if at is not None else time.time()
    request_id = str(uuid_utils.uuid7())
    common = {"id": request_id, "started_at": started}
    fields = {
        "tenant_id": TENANT, "key_id": KEY, "source": "api", "endpoint": "chat", "model": "m", "stream": True,
        "outcome": "ok", "status": 200, **record,
    }  # fmt: skip
    return Settled(
        usage=UsageRecord(**common, tenant_id=TENANT, key_id=KEY, model="m", outcome="ok", completion_tokens=5),
        record=RequestRecord(**common, **fields),
        detail=RequestDetail(**common, gaps=[1, 2, 3]),
    )


def test_the_same_record_twice_is_one_row() -> None:
    one, two = settled(), settled()
    DatabaseSink().write([one, two])
    DatabaseSink().write([two, one])
    assert UsageRow.objects.count() == RecordRow.objects.count() == DetailRow.objects.count() == 2


def test_cost_is_kept_to_the_last_digit_in_both_tables() -> None:
    one = settled(currency="EUR", cost=9_007_199_254_740_993, role="canary", retries=2)
    usage = msgspec.structs.replace(one.usage, currency="EUR", cost=9_007_199_254_740_993, price_version=3)
    for _ in range(2):
        DatabaseSink().write([Settled(usage=usage, record=one.record, detail=one.detail)])
    line, row = UsageRow.objects.get(), RecordRow.objects.get()
    assert (line.currency, line.cost, line.price_version) == ("EUR", Decimal("9007199.254740993"), 3)
    assert (row.currency, row.cost, row.role, row.retries) == ("EUR", Decimal("9007199.254740993"), "canary", 2)


def test_a_version_that_knows_nothing_of_money_may_still_write() -> None:
    columns = "id, started_at, tenant_id, key_id, model, outcome, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens"  # noqa: E501
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO billing_usagerecord ({columns}) VALUES (%s, now(), %s, %s, 'm', 'ok', 1, 0, 1, 0)",
            [uuid4(), TENANT, KEY],
        )
    assert (UsageRow.objects.get().currency, UsageRow.objects.get().cost) == ("", 0)


def test_an_unauthenticated_request_leaves_no_ledger_line() -> None:
    one = settled()
    DatabaseSink().write([Settled(usage=None, record=one.record, detail=one.detail)])
    assert UsageRow.objects.count() == 0
    assert RecordRow.objects.count() == 1


def test_a_record_that_arrives_weeks_late_finds_a_partition() -> None:
    late = settled(at=time.time() - 40 * 86400)
    DatabaseSink().write([late])
    assert RecordRow.objects.get(id=late.record.id).started_at.date() == datetime.now(UTC).date() - timedelta(days=40)


def test_nul_characters_do_not_stop_the_shipping() -> None:
    odd = settled(client_request_id="a\0b")
    DatabaseSink().write([odd])
    assert RecordRow.objects.get(id=odd.record.id).client_request_id == "a\ufffdb"


@pytest.mark.parametrize("message", ["a\0b", "a\\u0000b", "a\\\0b", "\\\\u0000", "\\\\\0"], ids=ascii)
def test_a_detail_is_json_whatever_was_quoted_in_it(message: str) -> None:
    """Seen: a model named backslash-u0000 made a detail that PostgreSQL refused, and all records after it waited."""
    one = settled()
    detail = msgspec.structs.replace(one.detail, error=message)
    DatabaseSink().write([Settled(usage=one.usage, record=one.record, detail=detail)])
    assert DetailRow.objects.get(id=one.record.id).body["error"] == message.replace("\0", "\ufffd")


def test_values_that_no_column_holds_are_cut_not_refused() -> None:
    """Seen: a model name of 121 characters, from any client, stopped all shipping."""
    odd = settled(model="x" * 500, code="c" * 500, finish_reason="f" * 99, client_request_id="i" * 99, attempts=10**6)
    usage = msgspec.structs.replace(odd.usage, model="x" * 500, completion_tokens=2**40)
    DatabaseSink().write([Settled(usage=usage, record=odd.record, detail=odd.detail)])
    row = RecordRow.objects.get(id=odd.record.id)
    assert (len(row.model), len(row.code), row.attempts) == (120, 64, 32767)
    assert UsageRow.objects.get(id=odd.record.id).completion_tokens == 2**31 - 1


def test_nothing_of_a_batch_is_written_when_one_row_cannot_be() -> None:
    with pytest.raises(RecordRefused), transaction.atomic():
        DatabaseSink().write([settled(), settled(tenant_id="nobody")])
    assert UsageRow.objects.count() == 0


def test_a_moment_that_no_calendar_holds_is_refused() -> None:
    with pytest.raises(RecordRefused):
        DatabaseSink().write([settled(at=1e18)])


def test_a_partition_that_was_dropped_meanwhile_is_made_again() -> None:
    sink, at = DatabaseSink(), time.time() - 60 * 86400
    sink.write([settled(at=at)])
    assert partitions.drop_old()
    late = settled(at=at)
    sink.write([late])
    assert RecordRow.objects.filter(id=late.record.id).exists()


@pytest.mark.parametrize(
    "statement",
    ["UPDATE billing_usagerecord SET completion_tokens = 0", "DELETE FROM billing_usagerecord"],
)
def test_the_ledger_refuses_update_and_delete(statement: str) -> None:
    DatabaseSink().write([settled()])
    with (
        pytest.raises(IntegrityError, match="append-only"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)


def test_partitions_are_made_a_week_ahead_and_dropped_past_their_time() -> None:
    today = date(2030, 6, 15)
    partitions.ensure(days_back=40, today=today)
    dropped = partitions.drop_old(today=today)
    assert "telemetry_requestdetail_20300607" in dropped
    assert "telemetry_requestdetail_20300608" not in dropped
    assert "telemetry_requestrecord_20300515" in dropped
    assert not any("203006" in name for name in dropped if "record" in name)


def test_a_record_row_stays_small() -> None:
    DatabaseSink().write([settled(trace_id="a" * 32, gateway="web-12345", client_request_id="c" * 36)])
    with connection.cursor() as cursor:
        cursor.execute("SELECT max(pg_column_size(r)) FROM telemetry_requestrecord r")
        assert cursor.fetchone()[0] <= 480
