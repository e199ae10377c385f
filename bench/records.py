"""Fills a stack's telemetry with made-up request records, by one SQL statement, spread over the last hours."""

from __future__ import annotations

import psycopg

from bench.stack import Stack

_SEED = """
INSERT INTO telemetry_requestrecord (
    id, started_at, tenant_id, key_id, replica_id, deployment_id, duration_us, ttft_us, itl_p50_us, itl_p99_us, itl_max_us,
    gateway_us, queue_us, engine_queue_us, prefill_us, decode_us, unattributed_us, snapshot_version, prompt_tokens,
    cached_tokens, completion_tokens, status, attempts, preemptions, stream, source, endpoint, model, outcome, code,
    finish_reason, device, end_user, client_request_id, trace_id, gateway, gateway_version, engine_version)
SELECT
    (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 3) || '8'
        || substr(md5(n::text), 4, 15))::uuid,
    date_trunc('milliseconds', at), (SELECT id FROM tenants_tenant WHERE name = 'default'), NULL, NULL, NULL,
    (400000 + 900000 * r)::bigint, (60000 + 300000 * r * r)::bigint, (18000 + 9000 * r)::bigint, (30000 + 20000 * r)::bigint,
    (60000 + 50000 * r)::bigint, 2000, 0, (1000 + 9000 * r)::bigint, (50000 + 280000 * r * r)::bigint, (300000 + 600000 * r)::bigint,
    900, 1, (40 + 900 * r)::int, (300 * r)::int, (10 + 120 * r)::int, 200, 1, 0, true, 'api', 'chat', 'smollm2-135m',
    CASE WHEN n %% 97 = 0 THEN 'cancelled' WHEN n %% 501 = 0 THEN 'error' ELSE 'ok' END, '', 'stop', 'cpu', '', '',
    md5(n::text), 'bench', '0', '0'
FROM (SELECT n, now() - make_interval(secs => 82000.0 * n / %(count)s) AS at, ((n::bigint * 7919) %% 1000) / 1000.0 AS r
      FROM generate_series(1, %(count)s) n) made
ON CONFLICT DO NOTHING
"""


def seed(stack: Stack, count: int) -> int:
    """Fill a running stack up to at least `count` records; returns how many there are then."""
    sockets = stack.data / "servers" / "run"
    with psycopg.connect(host=str(sockets), user="fanlight", dbname="fanlight", autocommit=True) as connection:
        row = connection.execute("SELECT count(*) FROM telemetry_requestrecord").fetchone()
        if row is not None and row[0] >= count:
            return int(row[0])
        connection.execute(_SEED, {"count": count})
        row = connection.execute("SELECT count(*) FROM telemetry_requestrecord").fetchone()
        assert row is not None
        return int(row[0])
