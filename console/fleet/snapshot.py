"""The Snapshot that gateways run on: read from PostgreSQL, kept fresh by NOTIFY and polling, kept on disk (0600)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from django.conf import settings
from psycopg.rows import dict_row

from console.base.layout import write_atomically
from console.errors import first_line
from console.version import version
from engine.adapters import embedded
from serving.port import Principal, Replica, Route, Snapshot, Target

log = logging.getLogger(__name__)

CHANNEL = "fanlight_snapshot"
POLL_S = 0.5

_VERSION = "SELECT version FROM base_snapshotversion WHERE id = 1"
_KEYS = """
SELECT k.digest, k.id::text AS key_id, k.name AS key_name, k.kind, k.allowed_models,
       extract(epoch FROM k.expires_at)::float8 AS expires_at,
       k.revoked_at IS NOT NULL OR NOT t.is_active AS revoked,
       t.id::text AS tenant_id, t.name AS tenant_name
FROM keys_apikey k JOIN tenants_tenant t ON t.id = k.tenant_id
"""
_REPLICAS = """
SELECT r.id::text, r.state, r.epoch, r.uds, r.device, r.engine_version, r.facts, r.ordinal,
       d.id::text AS deployment_id, d.name AS deployment_name, d.engine
FROM fleet_replica r JOIN fleet_deployment d ON d.id = r.deployment_id
WHERE r.state IN ('ready', 'draining')
"""
_ROUTES = """
SELECT r.id::text, r.name, r.policy, r.max_model_len, r.max_prompt_tokens, r.default_max_tokens,
       r.deadline_s, r.first_token_deadline_s, extract(epoch FROM r.created_at)::bigint AS created,
       coalesce(array_agg(t.deployment_id::text ORDER BY t.id) FILTER (WHERE t.weight > 0), '{}') AS deployment_ids,
       coalesce(array_agg(t.weight ORDER BY t.id) FILTER (WHERE t.weight > 0), '{}') AS weights
FROM fleet_route r LEFT JOIN fleet_routetarget t ON t.route_id = r.id
GROUP BY r.id
"""


class DatabaseSnapshots:
    """serving.port.SnapshotSource: one connection that listens, polls the version, and reloads on a change."""

    def __init__(self, cache_file: Path) -> None:
        self._cache_file = cache_file
        self._snapshot = _from_disk(cache_file)
        self._task: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None

    def current(self) -> Snapshot:
        """The newest Snapshot there is; its `taken_at` says when the database last confirmed it."""
        return self._snapshot

    async def start(self) -> None:
        """Load once if the database answers, then keep fresh in the background."""
        first = asyncio.Event()
        self._task = asyncio.create_task(self._keep_fresh(first), name="snapshot")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(first.wait(), timeout=5)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._writing is not None:  # a stop must not leave the copy for the next start half a version behind
            await self._writing

    async def _keep_fresh(self, first: asyncio.Event) -> None:
        delay = 0.2
        while True:
            try:
                async with await connect() as connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    while True:
                        await self._refresh(connection)
                        first.set()
                        delay = 0.2
                        async for _notice in connection.notifies(timeout=POLL_S, stop_after=1):
                            pass
            except (psycopg.Error, OSError) as error:
                log.warning("snapshot: the database does not answer: %s", first_line(error))
            except Exception:  # a refresher that dies quietly would freeze every gateway's configuration
                log.exception("snapshot: could not be refreshed; trying again")
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _refresh(self, connection: psycopg.AsyncConnection[dict[str, Any]]) -> None:
        row = await (await connection.execute(_VERSION)).fetchone()
        if row and row["version"] == self._snapshot.version:
            self._snapshot = msgspec.structs.replace(self._snapshot, taken_at=time.time())
            return
        self._snapshot = await _load(connection)
        self._writing = asyncio.create_task(asyncio.to_thread(_to_disk, self._cache_file, self._snapshot))
        await asyncio.shield(self._writing)


async def connect() -> psycopg.AsyncConnection[dict[str, Any]]:
    """A connection of its own, outside Django's: the gateway must not wait for the ORM's."""
    database: dict[str, Any] = settings.DATABASES["default"]
    return await psycopg.AsyncConnection.connect(
        host=database["HOST"],
        port=database.get("PORT") or None,
        dbname=database["NAME"],
        user=database["USER"],
        password=database.get("PASSWORD") or None,
        connect_timeout=3,
        autocommit=True,
        row_factory=dict_row,
        application_name="fanlight-snapshot",
    )


async def _load(connection: psycopg.AsyncConnection[dict[str, Any]]) -> Snapshot:
    """All rows and their version from one consistent view."""
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        version_row = await (await connection.execute(_VERSION)).fetchone()
        keys = await (await connection.execute(_KEYS)).fetchall()
        replicas = await (await connection.execute(_REPLICAS)).fetchall()
        routes = await (await connection.execute(_ROUTES)).fetchall()
    finally:
        await connection.execute("COMMIT")
    return Snapshot(
        version=version_row["version"] if version_row else 0,
        taken_at=time.time(),
        keys={row["digest"]: _principal(row) for row in keys if row["digest"]},
        playground={row["tenant_id"]: _principal(row) for row in keys if row["kind"] == "playground"},
        routes={row["name"]: _route(row) for row in routes},
        replicas={row["id"]: _replica(row) for row in replicas},
    )


def _principal(row: dict[str, Any]) -> Principal:
    return Principal(
        key_id=row["key_id"],
        key_name=row["key_name"],
        tenant_id=row["tenant_id"],
        tenant_name=row["tenant_name"],
        source=row["kind"],
        allowed_models=tuple(row["allowed_models"]) if row["allowed_models"] else None,
        expires_at=row["expires_at"],
        revoked=row["revoked"],
    )


def _route(row: dict[str, Any]) -> Route:
    targets = tuple(map(Target, row.pop("deployment_ids"), row.pop("weights")))
    return Route(**row, targets=targets)


def _replica(row: dict[str, Any]) -> Replica:
    facts = row["facts"]
    return Replica(
        id=row["id"],
        name=f"{row['deployment_name']} r{row['ordinal']}",
        deployment_id=row["deployment_id"],
        deployment_name=row["deployment_name"],
        state=row["state"],
        engine=row["engine"],
        engine_version=row["engine_version"],
        runtime=f"{row['engine']} {row['engine_version']}",
        device=row["device"],
        epoch=row["epoch"],
        uds=row["uds"] or None,
        served_name=facts.get("model", ""),
        extras=embedded.CALLER_EXTRAS if row["engine"] == "embedded" else None,
        max_num_seqs=facts.get("max_num_seqs", 0),
        num_blocks=facts.get("num_blocks", 0),
        block_size=facts.get("block_size", 0),
    )


def _from_disk(path: Path) -> Snapshot:
    """The last Snapshot, for a start without PostgreSQL; an empty one where there is none that fits this version."""
    empty = Snapshot(version=0, taken_at=0.0, keys={}, playground={}, routes={}, replicas={})
    try:
        written_by, snapshot = msgspec.json.decode(path.read_bytes(), type=tuple[str, Snapshot])
    except (OSError, msgspec.MsgspecError):
        return empty
    return snapshot if written_by == version() else empty


def _to_disk(path: Path, snapshot: Snapshot) -> None:
    try:
        write_atomically(path, msgspec.json.encode((version(), snapshot)).decode())
    except OSError as error:
        log.warning("snapshot: could not be kept on disk: %s", error)
