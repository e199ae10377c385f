"""What was asked of deployments: requests and waits of one minute, for the autoscaler."""

# ruff: noqa: S608  names that are spliced in are our own; every value is a parameter
from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.db import connection

from console.telemetry.queries import CAP

# Of requests that reached no deployment though they wanted one: they waited, or would have, or it was only starting.
_GAVE_UP = ("queue_timeout", "queue_full", "model_starting", "no_ready_replica")
SHARE = 0.95
_SQL = f"""
WITH newest AS (
  SELECT deployment_id, model, code, queue_us, requests, role FROM telemetry_requestrecord
  WHERE started_at >= %s AND started_at < %s ORDER BY started_at DESC, id DESC LIMIT {CAP}
)
SELECT deployment_id, NULL, sum(requests), percentile_cont({SHARE}) WITHIN GROUP (ORDER BY queue_us)
FROM newest WHERE deployment_id IS NOT NULL AND role <> 'shadow' GROUP BY deployment_id
UNION ALL
SELECT NULL, model, sum(requests), max(queue_us)
FROM newest WHERE deployment_id IS NULL AND code = ANY(%s) GROUP BY model
"""


@dataclass(frozen=True)
class Demand:
    """Requests within a window, and the wait in the queue that SHARE of them did not exceed, in seconds."""

    requests: int = 0
    queue_wait_s: float = 0.0


def demand(start: datetime, end: datetime, routes: Mapping[uuid.UUID, frozenset[str]]) -> dict[uuid.UUID, Demand]:
    """What was asked of each deployment. Those that gave up in a route's queue count for all of its deployments.

    Args:
        start, end: the window; requests that began in it count.
        routes: names of the routes that lead to a deployment.
    """
    with connection.cursor() as cursor:
        cursor.execute(_SQL, (start, end, list(_GAVE_UP)))
        rows = cursor.fetchall()
    served = {row[0]: (int(row[2]), float(row[3] or 0) / 1e6) for row in rows if row[0] is not None}
    lost = {row[1]: (int(row[2]), float(row[3] or 0) / 1e6) for row in rows if row[0] is None}
    found = {}
    for deployment_id in {*served, *routes}:
        answered, wait_s = served.get(deployment_id, (0, 0.0))
        given_up = [lost[name] for name in routes.get(deployment_id, frozenset()) if name in lost]
        count = sum(each for each, _wait in given_up)
        if count > (1 - SHARE) * (answered + count):  # the quantile lies among them
            wait_s = max(wait_s, *(longest for _count, longest in given_up))
        found[deployment_id] = Demand(answered + count, wait_s)
    return found
