"""How each deployment of a route has kept its promises since a moment: counts for whoever judges them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import connection

from console.telemetry.queries import reading

TIMEOUT_MS = 3000

# An attempt that failed and was answered elsewhere is in nobody's outcome, only in the request's detail.
_FAILED = """
WITH failed AS (
    SELECT p.deployment_id, count(*) AS n
    FROM telemetry_requestrecord r
    JOIN telemetry_requestdetail d ON d.started_at = r.started_at AND d.id = r.id
    CROSS JOIN LATERAL jsonb_array_elements(d.body -> 'attempts') AS a
    JOIN fleet_replica p ON p.id::text = a ->> 'replica_id'
    WHERE r.model = %(model)s AND r.started_at >= %(since)s AND d.started_at >= %(since)s
      AND (r.attempts > 1 OR r.outcome = 'error')
      AND a ->> 'error' NOT LIKE 'engine_overloaded%%'
    GROUP BY 1
), served AS (
    SELECT deployment_id,
           count(*) FILTER (WHERE outcome = 'ok') AS ok,
           count(*) FILTER (WHERE outcome = 'timeout') AS late,
           count(ttft_us) FILTER (WHERE outcome = 'ok') AS ttft,
           count(*) FILTER (WHERE outcome = 'ok' AND ttft_us > %(ttft_us)s) AS ttft_over,
           count(itl_p99_us) FILTER (WHERE outcome = 'ok') AS itl,
           count(*) FILTER (WHERE outcome = 'ok' AND itl_p99_us > %(itl_us)s) AS itl_over
    FROM telemetry_requestrecord
    WHERE model = %(model)s AND started_at >= %(since)s AND deployment_id IS NOT NULL
    GROUP BY 1
)
SELECT coalesce(s.deployment_id, f.deployment_id), coalesce(s.ok, 0), coalesce(s.late, 0), coalesce(f.n, 0),
       coalesce(s.ttft, 0), coalesce(s.ttft_over, 0), coalesce(s.itl, 0), coalesce(s.itl_over, 0)
FROM served s FULL JOIN failed f ON f.deployment_id = s.deployment_id
"""


@dataclass(frozen=True)
class Kept:
    """(requests, bad ones) for each promise. Refusals and clients that left say nothing of a deployment."""

    errors: tuple[int, int] = (0, 0)
    ttft: tuple[int, int] = (0, 0)
    itl: tuple[int, int] = (0, 0)


def kept(model: str, since: datetime, ttft_ms: float | None, itl_ms: float | None) -> dict[UUID, Kept]:
    """By deployment, of the requests of a route; what has no objective is not counted. Raises TooSlow."""
    parameters: dict[str, str | datetime | int | None] = {
        "model": model,
        "since": since,
        "ttft_us": None if ttft_ms is None else round(ttft_ms * 1000),
        "itl_us": None if itl_ms is None else round(itl_ms * 1000),
    }
    with reading(TIMEOUT_MS), connection.cursor() as cursor:
        cursor.execute(_FAILED, parameters)
        rows = cursor.fetchall()
    return {
        deployment: Kept(errors=(ok + late + failed, late + failed), ttft=(ttft, ttft_over), itl=(itl, itl_over))
        for deployment, ok, late, failed, ttft, ttft_over, itl, itl_over in rows
    }
