"""What requests of one route say of its targets and of its objectives. Bounded like console.telemetry.queries."""

# ruff: noqa: S608  names that are spliced in are our own; every value is a parameter
from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connection

from console.telemetry.queries import CAP, FAILED
from console.telemetry.windows import Window

_NEWEST = f"""SELECT id, started_at, deployment_id, role, outcome, status, attempts, ttft_us, itl_p50_us, itl_p99_us,
  requests
  FROM telemetry_requestrecord WHERE model = %s AND started_at >= %s AND started_at < %s
  ORDER BY started_at DESC, id DESC LIMIT {CAP}"""
_FAULTS = ("engine_error", "engine_unreachable", "deadline_exceeded")  # what a failed attempt says of its target


@dataclass(frozen=True)
class TargetCounts:
    """(requests, bad ones) of one deployment: failed, first token too late, own p99 gap too long."""

    errors: tuple[int, int] = (0, 0)
    ttft: tuple[int, int] = (0, 0)
    itl: tuple[int, int] = (0, 0)


def target_counts(
    model: str, deployments: Sequence[uuid.UUID], window: Window, ttft_ms: float | None, itl_ms: float | None
) -> dict[uuid.UUID, TargetCounts]:
    """Count the newest CAP requests against limits in ms (None: not counted); shadows' copies are among them.

    Refusals, clients that left and gateways that died say nothing of a target. A request that failed at a target and
    was answered by another counts as bad at the first: else retries would hide a target that always fails.
    """
    limits = [None if ms is None else ms * 1000 for ms in (ttft_ms, itl_ms)]
    sql = f"""
    WITH newest AS ({_NEWEST}), seen AS (
      SELECT id, deployment_id, outcome <> 'ok' AS bad, ttft_us, itl_p99_us FROM newest
      WHERE deployment_id = ANY(%s) AND outcome IN ('ok', 'error', 'timeout')
      UNION ALL
      SELECT n.id, r.deployment_id, true, NULL, NULL
      FROM newest n JOIN telemetry_requestdetail d ON d.started_at = n.started_at AND d.id = n.id
      CROSS JOIN LATERAL jsonb_to_recordset(coalesce(d.body->'attempts', '[]')) AS a(replica_id text, error text)
      JOIN fleet_replica r ON r.id::text = a.replica_id
      WHERE n.attempts > 1 AND a.error = ANY(%s) AND r.deployment_id = ANY(%s)
    ), each AS (
      SELECT deployment_id, bool_or(bad) AS bad, max(ttft_us) AS ttft, max(itl_p99_us) AS itl
      FROM seen GROUP BY id, deployment_id
    )
    SELECT deployment_id, count(*), count(*) FILTER (WHERE bad),
      count(ttft) FILTER (WHERE %s::float8 IS NOT NULL), count(*) FILTER (WHERE ttft > %s::float8),
      count(itl) FILTER (WHERE %s::float8 IS NOT NULL), count(*) FILTER (WHERE itl > %s::float8)
    FROM each GROUP BY deployment_id"""
    wanted = list(deployments)
    with connection.cursor() as cursor:
        cursor.execute(
            sql,
            (
                model, window.start, window.end, wanted, list(_FAULTS), wanted,
                limits[0], limits[0], limits[1], limits[1],
            ),
        )  # fmt: skip
        rows = cursor.fetchall()
    return {row[0]: TargetCounts((row[1], row[2]), (row[3], row[4]), (row[5], row[6])) for row in rows}


@dataclass(frozen=True)
class Measured:
    """A route over a window: (requests, bad ones) of each objective, and the values. Times are microseconds.

    Bad for availability: failed, or refused with a 5xx. Refusals that are the caller's and clients that left are in
    neither number.
    """

    availability: tuple[int, int]
    ttft: tuple[int, int]
    itl: tuple[int, int]
    ttft_p99_us: float | None
    itl_p99_us: float | None
    itl_p50_us: float | None
    since: datetime | None  # the oldest request that was looked at

    @property
    def jitter(self) -> float | None:
        """ITL p99 over p50."""
        return self.itl_p99_us / self.itl_p50_us if self.itl_p99_us is not None and self.itl_p50_us else None


def measured(model: str, window: Window, ttft_ms: float | None, itl_ms: float | None) -> Measured:
    """What the newest CAP requests of the window come to; shadows' copies are not among them."""
    sql = f"""
    WITH newest AS ({_NEWEST}), own AS (
      SELECT *, outcome = ANY(%s) OR (outcome = 'rejected' AND status >= 500) AS bad FROM newest WHERE role <> 'shadow')
    SELECT coalesce(sum(requests) FILTER (WHERE outcome = 'ok' OR bad), 0),
      coalesce(sum(requests) FILTER (WHERE bad), 0),
      count(ttft_us), count(*) FILTER (WHERE ttft_us > %s::float8),
      count(itl_p99_us), count(*) FILTER (WHERE itl_p99_us > %s::float8),
      percentile_cont(0.99) WITHIN GROUP (ORDER BY ttft_us), percentile_cont(0.99) WITHIN GROUP (ORDER BY itl_p99_us),
      percentile_cont(0.5) WITHIN GROUP (ORDER BY itl_p50_us), min(started_at)
    FROM own"""
    limits = [None if ms is None else ms * 1000 for ms in (ttft_ms, itl_ms)]
    with connection.cursor() as cursor:
        cursor.execute(sql, (model, window.start, window.end, list(FAILED), *limits))
        row = cursor.fetchone()
    assert row is not None  # an aggregate without groups has one row
    return Measured((row[0], row[1]), (row[2], row[3]), (row[4], row[5]), row[6], row[7], row[8], row[9])
