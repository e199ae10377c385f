"""The Snapshot that gateways run on: read from PostgreSQL, kept fresh by NOTIFY and polling, kept on disk (0600)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any, LiteralString

import msgspec
import psycopg
from django.conf import settings
from psycopg.rows import dict_row

from console.base.layout import write_atomically
from console.base.sealing import SealBroken, unseal
from console.errors import first_line
from console.tenants.limits import LIMITS, limits_of, lower
from console.version import version
from engine.adapters import ADAPTERS
from serving.port import Deployment, Objectives, Price, Principal, Replica, Route, Snapshot, Target

log = logging.getLogger(__name__)

CHANNEL = "fanlight_snapshot"
POLL_S = 0.5

_VERSION = "SELECT version, extract(epoch FROM now())::float8 AS now FROM base_snapshotversion WHERE id = 1"
_REPLICAS = """
SELECT r.id::text, r.state, r.epoch, r.uds, r.device, r.engine_version, r.facts, r.ordinal,
       d.id::text AS deployment_id, d.name AS deployment_name, d.engine, e.base_url, e.api_key_sealed
FROM fleet_replica r JOIN fleet_deployment d ON d.id = r.deployment_id
     LEFT JOIN fleet_endpoint e ON e.deployment_id = d.id
WHERE r.state IN ('ready', 'draining')
"""
_ROUTES = """
SELECT r.*, r.id::text AS id, extract(epoch FROM r.created_at)::bigint AS created,
       array(SELECT f.deployment_id::text FROM fleet_routefallback f WHERE f.route_id = r.id ORDER BY f.position)
           AS fallbacks
FROM fleet_route r
"""
_TARGETS = """
SELECT t.route_id::text, t.deployment_id::text, t.weight, t.role,
       t.unevaluated OR d.evaluated OR d.quantisation = '' AS stands_in
FROM fleet_routetarget t JOIN fleet_deployment d ON d.id = t.deployment_id WHERE t.weight > 0 ORDER BY t.id
"""
_DEPLOYMENTS = """
SELECT d.id::text, d.name, d.start_s, d.desired_replicas = 0 AND d.min_replicas = 0 AND d.autoscale AS wakes,
       d.desired_replicas > 0 AND (
         EXISTS (SELECT FROM fleet_rollout o WHERE o.deployment_id = d.id AND o.state IN ('running', 'rolling_back'))
         OR EXISTS (SELECT FROM fleet_replica r WHERE r.deployment_id = d.id AND (
           (r.wanted AND r.failures BETWEEN 1 AND 3
             AND r.state IN ('hung', 'failed', 'starting', 'loading', 'verifying'))
           OR (r.state = 'draining' AND NOT r.wanted)))) AS between,
       (SELECT extract(epoch FROM min(r.started_at))::float8 FROM fleet_replica r
        WHERE r.deployment_id = d.id AND r.state IN ('starting', 'loading', 'verifying')) AS starting_at
FROM fleet_deployment d WHERE d.engine <> 'external'
"""
_PRICES = """
SELECT DISTINCT ON (model, currency) model, currency, version,
       (input * 1000000)::bigint AS input, (cached_input * 1000000)::bigint AS cached_input,
       (output * 1000000)::bigint AS output
FROM pricing_price WHERE effective_at <= now()
ORDER BY model, currency, effective_at DESC, version DESC
"""
_NEXT_PRICE = "SELECT extract(epoch FROM min(effective_at))::float8 AS at FROM pricing_price WHERE effective_at > now()"


def _limit_columns(table: str, prefix: str) -> str:
    return ", ".join(f"{table}.{name} AS {prefix}{name}" for name in LIMITS)


_KEYS = f"""
SELECT k.digest, k.id::text AS key_id, k.name AS key_name, k.kind, k.allowed_models, k.may_override,
       extract(epoch FROM k.expires_at)::float8 AS expires_at,
       k.revoked_at IS NOT NULL OR NOT t.is_active AS revoked, k.priority AS key_priority,
       t.id::text AS tenant_id, t.name AS tenant_name, t.weight, t.priority, t.currency, t.billing_zone,
       t.capture_content, {_limit_columns("k", "key_")}, {_limit_columns("t", "tenant_")}
FROM keys_apikey k JOIN tenants_tenant t ON t.id = k.tenant_id
"""  # noqa: S608  names of columns are our own


class DatabaseSnapshots:
    """serving.port.SnapshotSource: one connection that listens, polls the version, and reloads on a change."""

    def __init__(self, cache_file: Path) -> None:
        self._cache_file = cache_file
        self._snapshot = _from_disk(cache_file)
        self._next_price_at: float | None = None  # the database's seconds; then prices change without a write
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
        due = row is not None and self._next_price_at is not None and row["now"] >= self._next_price_at
        if row and row["version"] == self._snapshot.version and not due:
            self._snapshot = msgspec.structs.replace(self._snapshot, taken_at=time.time())
            return
        self._snapshot, self._next_price_at = await _load(connection)
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


async def _load(connection: psycopg.AsyncConnection[dict[str, Any]]) -> tuple[Snapshot, float | None]:
    """All rows and their version from one consistent view, and when the next price takes effect."""

    async def rows(sql: LiteralString) -> list[dict[str, Any]]:
        return await (await connection.execute(sql)).fetchall()

    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        versions = await rows(_VERSION)
        keys = await rows(_KEYS)
        replicas, deployments = await rows(_REPLICAS), await rows(_DEPLOYMENTS)
        routes, targets, prices = await rows(_ROUTES), await rows(_TARGETS), await rows(_PRICES)
        (next_price,) = await rows(_NEXT_PRICE)
    finally:
        await connection.execute("COMMIT")
    snapshot = Snapshot(
        version=versions[0]["version"] if versions else 0,
        taken_at=time.time(),
        keys={row["digest"]: _principal(row) for row in keys if row["digest"]},
        playground={row["tenant_id"]: _principal(row) for row in keys if row["kind"] == "playground"},
        routes={row["name"]: _route(row, targets, prices) for row in routes},
        replicas={replica.id: replica for replica in map(_replica, replicas) if replica is not None},
        deployments={row["id"]: _deployment(row) for row in deployments},
    )
    return snapshot, next_price["at"]


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
        limits=limits_of(row, "key_"),
        tenant_limits=limits_of(row, "tenant_"),
        weight=row["weight"],
        priority=lower(row["key_priority"], row["priority"]),
        currency=row["currency"],
        billing_zone=row["billing_zone"],
        may_override=row["may_override"],
        capture_content=row["capture_content"],
    )


_ROUTE_COLUMNS = frozenset(Route.__struct_fields__) - {"targets", "fallbacks", "objectives", "prices", "owned_by"}


def _route(row: dict[str, Any], targets: list[dict[str, Any]], prices: list[dict[str, Any]]) -> Route:
    objectives = {name: row[f"objective_{name}"] for name in Objectives.__struct_fields__}
    return Route(
        **{name: row[name] for name in _ROUTE_COLUMNS},
        targets=tuple(
            Target(t["deployment_id"], t["weight"], t["role"], t["stands_in"])
            for t in targets
            if t["route_id"] == row["id"]
        ),
        fallbacks=tuple(row["fallbacks"]),
        objectives=Objectives(**objectives),
        prices={
            p["currency"]: Price(**{name: p[name] for name in Price.__struct_fields__})
            for p in prices
            if p["model"] == row["name"]
        },
    )


def _deployment(row: dict[str, Any]) -> Deployment:
    """One that never started is taken to need as long as the struct says."""
    learnt = {} if row["start_s"] is None else {"start_s": row["start_s"]}
    return Deployment(
        id=row["id"],
        name=row["name"],
        wakes=row["wakes"],
        between=row["between"],
        starting_at=row["starting_at"],
        **learnt,
    )


def _replica(row: dict[str, Any]) -> Replica | None:
    """None for an endpoint whose key cannot be read: it must not take the others along.

    And none for one whose address is newer than its check: a key goes to the host that it was given for, or nowhere.
    """
    facts = row["facts"]
    external = row["engine"] == "external"
    if external and facts.get("url") != row["base_url"]:
        return None
    try:
        api_key = unseal(row["api_key_sealed"]) if external and row["api_key_sealed"] else None
    except SealBroken as error:
        log.error("snapshot: the API key of %s cannot be read: %s", row["deployment_name"], error)
        return None
    return Replica(
        id=row["id"],
        name=f"{row['deployment_name']} r{row['ordinal']}",
        deployment_id=row["deployment_id"],
        deployment_name=row["deployment_name"],
        state=row["state"],
        engine=row["engine"],
        engine_version=row["engine_version"],
        runtime=f"{row['engine']} {row['engine_version']}".strip(),
        device=row["device"],
        epoch=row["epoch"],
        uds=row["uds"] or None,
        url=facts.get("url") if external else None,
        addresses=tuple(facts.get("addresses", ())) if external else (),
        api_key=api_key,
        served_name=facts.get("model", ""),
        extras=_EXTRAS.get(row["engine"]),
        max_num_seqs=facts.get("max_num_seqs", 0),
        num_blocks=facts.get("num_blocks", 0),
        block_size=facts.get("block_size", 0),
    )


_EXTRAS = {"external": frozenset[str]()} | {name: each.extras for name, each in ADAPTERS.items()}


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
