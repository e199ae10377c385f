"""Every read of telemetry. Each takes a Scope and a Window; none can be asked for rows without them.

Percentiles are exact over the newest CAP rows of the window; a row may stand for many refusals (`requests`).
`reading()` bounds the time a page may spend in the database: the partitions lie on the disk that the ledger is
written to.
"""

# ruff: noqa: S608  names that are spliced in are our own; every value is a parameter
from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connection, transaction

from console.telemetry import windows
from console.telemetry.filters import Condition
from console.telemetry.models import EngineSpan, RequestDetail, RequestRecord
from console.telemetry.scope import Scope
from console.telemetry.windows import Window

CAP = 100_000
EXPORT_CAP = 50_000
PAGE = 50
SPANS = 20
TIMEOUT_MS = 5_000
_TABLE = "telemetry_requestrecord"
_MS = timedelta(milliseconds=1)

CANCELLED = ("cancelled", "slow_reader")
FAILED = ("error", "timeout", "gateway_lost")

SLOWEST_LAYER = """CASE greatest(queue_us, engine_queue_us, prefill_us, gateway_us, unattributed_us)
 WHEN prefill_us THEN 'prefill' WHEN queue_us THEN 'queue' WHEN engine_queue_us THEN 'engine_queue'
 WHEN gateway_us THEN 'gateway' ELSE 'unattributed' END"""
_LAYER_US = "greatest(queue_us, engine_queue_us, prefill_us, gateway_us, unattributed_us)"

GROUPS = {
    "layer": SLOWEST_LAYER,
    "model": "model",
    "tenant": "tenant_id::text",
    "key": "key_id::text",
    "replica": "replica_id::text",
    "outcome": "outcome",
    "cached": "CASE WHEN cached_tokens > 0 THEN 'cached' ELSE 'none' END",
}


class TooSlow(Exception):
    """The database did not answer within TIMEOUT_MS; a shorter time range will do."""


@contextmanager
def reading(timeout_ms: int = TIMEOUT_MS) -> Iterator[None]:
    """One consistent, read-only, bounded look at the database."""
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL statement_timeout = {int(timeout_ms)}")
            yield
    except OperationalError as error:
        if "statement timeout" in str(error):
            raise TooSlow from error
        raise


# ---------------------------------------------------------------------------------------------------------------
# Conditions to SQL


@dataclass(frozen=True)
class Where:
    """A WHERE clause and its parameters."""

    sql: str
    params: tuple[Any, ...]

    def and_(self, sql: str, *params: Any) -> Where:
        return Where(f"{self.sql} AND {sql}", (*self.params, *params))


def where(scope: Scope, window: Window, conditions: Sequence[Condition] = (), shadows: bool = False) -> Where:
    """Scope and window first: they choose partitions and index. Names in conditions must be resolved to ids.

    Copies for shadow targets were sent by nobody: they are left out unless `shadows`, or a condition on the role.
    """
    clause = Where("started_at >= %s AND started_at < %s", (window.start, window.end))
    if scope.tenant_ids is not None:
        clause = clause.and_("tenant_id = ANY(%s)", list(scope.tenant_ids))
    if not (shadows or of_roles(conditions)):
        clause = clause.and_("role <> 'shadow'")
    for condition in conditions:
        sql, params = _condition(condition)
        clause = clause.and_(f"NOT coalesce({sql}, false)" if condition.negated else sql, *params)
    return clause


def of_roles(conditions: Sequence[Condition]) -> bool:
    """Whether roles are asked for, and with them perhaps shadows."""
    return any(condition.field == "role" for condition in conditions)


def _condition(condition: Condition) -> tuple[str, tuple[Any, ...]]:
    if condition.op != "in":
        column = "(prompt_tokens + completion_tokens)" if condition.field == "tokens" else condition.field
        return f"{column} {condition.op} %s", (condition.number,)
    values = list(condition.values)
    match condition.field:
        case "outcome":
            return "(outcome = ANY(%s) OR status::text = ANY(%s))", (values, values)
        case "tenant" | "key" | "replica":
            return f"{condition.field}_id = ANY(%s)", ([uuid.UUID(v) for v in values],)
        case "id":
            return "id = ANY(%s)", ([uuid.UUID(v) for v in values],)
        case "stream":
            return "stream = ANY(%s)", ([v == "yes" for v in values],)
        case "layer":
            return f"{SLOWEST_LAYER} = ANY(%s)", (values,)
        case _:
            return f"{condition.field} = ANY(%s)", (values,)


# ---------------------------------------------------------------------------------------------------------------
# Overview


@dataclass(frozen=True)
class Slice:
    """Figures of one bar of a chart, or of the whole window. Times are microseconds; None where nobody measured."""

    bucket: int | None
    requests: int = 0
    ok: int = 0
    cancelled: int = 0
    rejected: int = 0
    failed: int = 0
    ttft: tuple[float | None, float | None] = (None, None)  # p50, p99
    itl: tuple[float | None, float | None] = (None, None)  # of each request's own p50 and p99
    queue: tuple[float | None, float | None] = (None, None)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that a KV cache held, over requests that reached an engine."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def rejected_share(self) -> float | None:
        return self.rejected / self.requests if self.requests else None

    @property
    def failed_share(self) -> float | None:
        return self.failed / self.requests if self.requests else None


@dataclass(frozen=True)
class Traffic:
    """The whole window and its bars, oldest first; `capped` when older rows were left out."""

    total: Slice
    slices: tuple[Slice, ...]
    capped: bool


def traffic(scope: Scope, window: Window, cap: int = CAP) -> Traffic:
    """Counts and exact percentiles of a window, as a whole and by bar."""
    clause = where(scope, window)
    step = window.bucket_s
    sql = f"""
    WITH newest AS (
      SELECT started_at, outcome, attempts, ttft_us, itl_p50_us, itl_p99_us, queue_us, prompt_tokens, cached_tokens,
             completion_tokens, requests
      FROM {_TABLE} WHERE {clause.sql} ORDER BY started_at DESC, id DESC LIMIT {int(cap)}
    ), bars AS (SELECT *, floor(extract(epoch FROM started_at - %s) / {int(step)})::int AS bucket FROM newest)
    SELECT count(*), bucket, coalesce(sum(requests), 0), count(*) FILTER (WHERE outcome = 'ok'),
      count(*) FILTER (WHERE outcome = ANY(%s)), coalesce(sum(requests) FILTER (WHERE outcome = 'rejected'), 0),
      count(*) FILTER (WHERE outcome = ANY(%s)),
      percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY ttft_us),
      percentile_cont(0.5) WITHIN GROUP (ORDER BY itl_p50_us),
      percentile_cont(0.99) WITHIN GROUP (ORDER BY itl_p99_us),
      percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY queue_us) FILTER (WHERE attempts > 0),
      coalesce(sum(prompt_tokens) FILTER (WHERE attempts > 0), 0), coalesce(sum(cached_tokens), 0),
      coalesce(sum(completion_tokens), 0)
    FROM bars GROUP BY GROUPING SETS ((bucket), ()) ORDER BY bucket NULLS FIRST"""
    rows = _fetch(sql, (*clause.params, window.start, list(CANCELLED), list(FAILED)))
    bars = -(-int(window.seconds) // step)
    by_bucket = {row[1]: _slice(row[1:]) for row in rows}
    total = by_bucket.get(None, Slice(None))
    slices = tuple(by_bucket.get(n) or Slice(n) for n in range(bars))
    read = sum(row[0] for row in rows if row[1] is None)
    return Traffic(total, slices, read >= cap)


def _slice(row: tuple[Any, ...]) -> Slice:
    (
        bucket,
        requests,
        ok,
        cancelled,
        rejected,
        failed,
        ttft,
        itl_50,
        itl_99,
        queue,
        prompt,
        cached,
        completion,
    ) = row
    return Slice(
        bucket, requests, ok, cancelled, rejected, failed, _pair(ttft), (itl_50, itl_99), _pair(queue),
        prompt, cached, completion,
    )  # fmt: skip


def _pair(values: list[float | None] | None) -> tuple[float | None, float | None]:
    return (values[0], values[1]) if values else (None, None)


@dataclass(frozen=True)
class Rate:
    """What went through in the last minute, a second."""

    requests: float = 0.0
    tokens_in: float = 0.0
    tokens_out: float = 0.0
    failed: int = 0
    seen: int = 0


def rate(scope: Scope, now: datetime, seconds: int = 60) -> Rate:
    """Requests and tokens a second over the last minute. A request counts when it was received."""
    clause = where(scope, Window(now - timedelta(seconds=seconds), now, "custom"))
    row = _fetch(
        f"""SELECT coalesce(sum(requests), 0), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0),
        count(*) FILTER (WHERE outcome = ANY(%s)) FROM {_TABLE} WHERE {clause.sql}""",
        (list(FAILED), *clause.params),
    )[0]
    return Rate(row[0] / seconds, row[1] / seconds, row[2] / seconds, row[3], row[0])


def slowest(scope: Scope, window: Window, count: int = 6) -> list[RequestRecord]:
    """The slowest to their first token among the newest CAP requests of the window."""
    clause = where(scope, window).and_("ttft_us IS NOT NULL")
    return _records(
        f"""SELECT * FROM (SELECT * FROM {_TABLE} WHERE {clause.sql} ORDER BY started_at DESC, id DESC LIMIT {CAP}) n
        ORDER BY ttft_us DESC, started_at DESC LIMIT {int(count)}""",
        clause.params,
    )


# ---------------------------------------------------------------------------------------------------------------
# The list


@dataclass(frozen=True)
class Page:
    """One page of requests, newest first. `newer` and `older` are ids to page from; None at an end."""

    records: list[RequestRecord]
    newer: uuid.UUID | None
    older: uuid.UUID | None


def page(
    scope: Scope,
    window: Window,
    conditions: Sequence[Condition] = (),
    before: uuid.UUID | None = None,
    after: uuid.UUID | None = None,
    limit: int = PAGE,
) -> Page:
    """Keyset paging: rows older than `before`, or the ones just newer than `after`."""
    clause = where(scope, window, conditions)
    cursor_id = before or after
    at = windows.stamp(cursor_id) if cursor_id else None
    if before and at:
        clause = clause.and_("(started_at, id) < (%s, %s)", at, before)
    elif after and at:
        clause = clause.and_("(started_at, id) > (%s, %s)", at, after)
    forward = bool(after and at)
    order = "ASC" if forward else "DESC"
    rows = _records(
        f"SELECT * FROM {_TABLE} WHERE {clause.sql} ORDER BY started_at {order}, id {order} LIMIT {int(limit) + 1}",
        clause.params,
    )
    more, rows = len(rows) > limit, rows[:limit]
    if forward:
        rows.reverse()
    if not rows:
        return Page([], None, None)
    has_newer = more if forward else bool(before)
    has_older = True if forward else more
    return Page(rows, rows[0].id if has_newer else None, rows[-1].id if has_older else None)


@dataclass(frozen=True)
class Summary:
    """How many of the window's requests match, with exact percentiles of those; `capped` at CAP newest rows."""

    matching: int
    total: int
    ttft: tuple[float | None, float | None]
    duration: tuple[float | None, float | None]
    capped: bool


def summary(scope: Scope, window: Window, conditions: Sequence[Condition]) -> Summary:
    """Count and percentiles over the newest CAP rows of the window."""
    everything = where(scope, window, shadows=of_roles(conditions))
    wanted = where(scope, window, conditions)
    extra = wanted.sql[len(everything.sql) :].removeprefix(" AND ") or "true"
    row = _fetch(
        f"""WITH newest AS (
          SELECT * FROM {_TABLE} WHERE {everything.sql} ORDER BY started_at DESC, id DESC LIMIT {CAP}),
        flagged AS (SELECT ttft_us, duration_us, requests, ({extra}) AS hit FROM newest)
        SELECT coalesce(sum(requests), 0), coalesce(sum(requests) FILTER (WHERE hit), 0),
          percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY ttft_us) FILTER (WHERE hit),
          percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY duration_us) FILTER (WHERE hit), count(*)
        FROM flagged""",
        (*everything.params, *wanted.params[len(everything.params) :]),
    )[0]
    return Summary(row[1], row[0], _pair(row[2]), _pair(row[3]), row[4] >= CAP)


@dataclass(frozen=True)
class Histogram:
    """Counts of TTFT in logarithmic bars between `low_us` and `high_us`."""

    low_us: float
    high_us: float
    counts: tuple[int, ...]


def histogram(scope: Scope, window: Window, conditions: Sequence[Condition], bars: int = 84) -> Histogram | None:
    """TTFT of what the conditions leave, without the ones on TTFT itself: those are the selection."""
    rest = [condition for condition in conditions if condition.field != "ttft_us"]
    clause = where(scope, window, rest).and_("ttft_us > 0")
    rows = _fetch(
        f"""WITH newest AS (
          SELECT ttft_us FROM {_TABLE} WHERE {clause.sql} ORDER BY started_at DESC, id DESC LIMIT {CAP}),
        ends AS (SELECT min(ttft_us) * 0.95 AS low, max(ttft_us) * 1.05 AS high FROM newest)
        SELECT low, high, width_bucket(ln(ttft_us), ln(low), ln(high), {int(bars)}) AS bar, count(*)
        FROM newest, ends GROUP BY low, high, bar""",
        clause.params,
    )
    if not rows:
        return None
    counts = [0] * bars
    for _low, _high, bar, count in rows:
        counts[min(bars, max(1, bar)) - 1] += count
    return Histogram(float(rows[0][0]), float(rows[0][1]), tuple(counts))


@dataclass(frozen=True)
class Group:
    """One value of what the matching requests were grouped by."""

    value: str | None
    requests: int
    share: float
    median_us: float | None  # time in the slowest layer, or to the first token


def groups(scope: Scope, window: Window, conditions: Sequence[Condition], by: str, limit: int = 6) -> list[Group]:
    """The matching requests by their slowest layer, tenant, key, …; the largest groups first."""
    clause = where(scope, window, conditions)
    measure = _LAYER_US if by == "layer" else "ttft_us"
    rows = _fetch(
        f"""WITH newest AS (SELECT * FROM {_TABLE} WHERE {clause.sql} ORDER BY started_at DESC, id DESC LIMIT {CAP})
        SELECT {GROUPS[by]} AS value, sum(requests) AS n, percentile_cont(0.5) WITHIN GROUP (ORDER BY {measure}),
          sum(sum(requests)) OVER () FROM newest GROUP BY 1 ORDER BY n DESC, 1 LIMIT {int(limit)}""",
        clause.params,
    )
    return [Group(value, n, n / float(total), median) for value, n, median, total in rows]


def export(
    scope: Scope,
    window: Window,
    conditions: Sequence[Condition],
    limit: int = EXPORT_CAP,
    chunk: int = 1000,
) -> Iterator[list[RequestRecord]]:
    """The matching rows in pages, newest first, at most `limit`. Each page is a query of its own."""
    before: uuid.UUID | None = None
    while limit > 0:
        with reading():
            found = page(scope, window, conditions, before=before, limit=min(chunk, limit))
        if found.records:
            yield found.records
        limit -= len(found.records)
        before = found.older
        if before is None:
            return


# ---------------------------------------------------------------------------------------------------------------
# One request


def record(scope: Scope, request_id: uuid.UUID) -> RequestRecord | None:
    """The row of one request, if the scope may read it. The id holds the time, so one partition is visited."""
    at = windows.stamp(request_id)
    if at is None:
        return None
    clause = where(scope, Window(at, at + _MS, "custom"), shadows=True).and_("id = %s", request_id)
    found = _records(f"SELECT * FROM {_TABLE} WHERE {clause.sql}", clause.params)
    return found[0] if found else None


def exists(request_id: uuid.UUID) -> bool:
    """Whether the request was delivered, whoever it belongs to."""
    return record(Scope(None), request_id) is not None


def detail(row: RequestRecord) -> dict[str, Any]:
    """Events and decisions of a request; empty once its retention is over."""
    found = RequestDetail.objects.filter(id=row.id, started_at=row.started_at).first()
    return found.body if found else {}


def engine_spans(row: RequestRecord) -> list[EngineSpan]:
    """What engines told of a request by OTLP, oldest first."""
    return list(EngineSpan.objects.filter(request_id=row.id, started_at=row.started_at).order_by("begun_ns")[:SPANS])


def neighbours(scope: Scope, row: RequestRecord) -> tuple[uuid.UUID | None, uuid.UUID | None]:
    """The requests just before and just after, within a day."""
    day = timedelta(days=1)
    window = Window(row.started_at - day, row.started_at + day, "custom")
    older = page(scope, window, before=row.id, limit=1).records
    newer = page(scope, window, after=row.id, limit=1).records
    return (older[0].id if older else None, newer[0].id if newer else None)


@dataclass(frozen=True)
class Rank:
    """Where a request stands among its model's requests of the hour around it: 0..1, None where nothing compares."""

    ttft: float | None
    duration: float | None
    among: int


def rank(scope: Scope, row: RequestRecord, cap: int = 10_000) -> Rank:
    """Share of comparable requests that were not slower."""
    half = timedelta(minutes=30)
    clause = where(scope, Window(row.started_at - half, row.started_at + half, "custom")).and_(
        "model = %s AND outcome = 'ok'", row.model
    )
    found = _fetch(
        f"""WITH newest AS (SELECT ttft_us, duration_us FROM {_TABLE} WHERE {clause.sql}
          ORDER BY started_at DESC, id DESC LIMIT {int(cap)})
        SELECT avg((ttft_us <= %s)::int), avg((duration_us <= %s)::int), count(*) FROM newest""",
        (*clause.params, row.ttft_us, row.duration_us),
    )[0]
    enough = found[2] >= 20
    return Rank(
        float(found[0]) if enough and found[0] is not None and row.ttft_us is not None else None,
        float(found[1]) if enough and found[1] is not None else None,
        found[2],
    )


def resolved(condition: Condition, ids: Sequence[uuid.UUID]) -> Condition:
    """The condition on a name, with the ids that bear it. No id: it matches nothing."""
    return replace(condition, values=tuple(str(i) for i in ids))


def _fetch(sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def _records(sql: str, params: Sequence[Any]) -> list[RequestRecord]:
    return list(RequestRecord.objects.raw(sql, params))
