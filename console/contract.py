"""Implements serving.port for the console, and holds this process's gateway for the pages that need it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from uuid import UUID

import msgspec
import redis.asyncio
from django.conf import settings

from console.base.models import User
from console.errors import NotAllowed
from console.fleet.live import PREFIX
from console.fleet.snapshot import DatabaseSnapshots
from console.keys.actions import ensure_playground_key, server_secret
from console.tenants.limits import lower
from console.tenants.queries import usable_tenants
from console.version import version
from serving.asgi import Gateway
from serving.port import GatewaySettings, Inference, Principal, Receive, ReplicaLoad, Send

_POLL_S = 0.5


class NotServing(Exception):
    """This process runs no gateway, so it cannot take a request."""


class ValkeyLiveState:
    """serving.port.LiveState: polls what the controller publishes; knows nothing while Valkey is away."""

    def __init__(self, snapshots: DatabaseSnapshots) -> None:
        self._snapshots = snapshots
        self._loads: dict[str, ReplicaLoad] = {}
        self._task: asyncio.Task[None] | None = None

    def load(self, replica_id: str) -> ReplicaLoad | None:
        return self._loads.get(replica_id)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._poll(), name="live-state")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _poll(self) -> None:
        client = redis.asyncio.Redis.from_url(settings.VALKEY_URL, socket_timeout=1.0, socket_connect_timeout=1.0)
        async with client:
            while True:
                ids = list(self._snapshots.current().replicas)
                try:
                    values = await client.mget([PREFIX + each for each in ids]) if ids else []
                except (redis.RedisError, OSError):
                    values = [None] * len(ids)
                self._loads = {each: _load(value) for each, value in zip(ids, values, strict=True) if value}
                await asyncio.sleep(_POLL_S)


def _load(value: bytes | str) -> ReplicaLoad:
    stats = msgspec.json.decode(value)
    return ReplicaLoad(
        at=stats["at"],
        running=stats["running"],
        waiting=stats["waiting"],
        kv_usage=stats["kv_usage"],
        free_blocks=stats["free_blocks"],
        steps=stats["steps"],
    )


class Serving:
    """The gateway of this process with what keeps it informed."""

    def __init__(self, role: str) -> None:
        env = settings.ENV
        self.snapshots = DatabaseSnapshots(settings.LAYOUT.run / "snapshot.json")
        self.live = ValkeyLiveState(self.snapshots)
        self.gateway = Gateway(
            GatewaySettings(
                journal_root=settings.LAYOUT.journal,
                secret=server_secret(),
                version=version(),
                instance=f"{role}-{os.getpid()}",
                max_body_bytes=env["MAX_BODY_BYTES"],
                snapshot_max_age_s=env["SNAPSHOT_MAX_AGE"],
                valkey_url=settings.VALKEY_URL,
                siblings=settings.LAYOUT.run / "metrics",
                metrics_token=env["METRICS_TOKEN"] or None,
                trusted_proxies=env["TRUSTED_PROXIES"],
                min_free_disk_bytes=env["MIN_FREE_DISK_BYTES"],
                drain_s=env["DRAIN_SECONDS"],
                fault_delays=env["FAULT_DELAYS"],
            ),
            self.snapshots,
            self.live,
        )

    async def startup(self) -> None:
        await self.snapshots.start()
        await self.live.start()
        await self.gateway.startup()

    async def shutdown(self) -> None:
        await self.gateway.shutdown()
        await self.live.stop()
        await self.snapshots.stop()


_serving: Serving | None = None


def serve(role: str) -> Serving:
    """Make this process's gateway; its ASGI module calls it once. `role` begins its name in records and logs."""
    global _serving
    if _serving is None:
        _serving = Serving(role)
    return _serving


async def lifespan(serving: Serving, receive: Receive, send: Send) -> None:
    """Start the gateway before the first request and stop it after the last."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await serving.startup()
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await serving.shutdown()
            await send({"type": "lifespan.shutdown.complete"})
            return


async def drain() -> None:
    """Take no new request on /v1 or in the playground, and let the running ones finish; who asks then is told why."""
    if _serving is not None:
        await _serving.gateway.drain()


def inference() -> Inference:
    """The pipeline of this process, for the playground. Raises NotServing where there is none."""
    if _serving is None:
        raise NotServing("This process has no gateway; the playground is reached through `manage.py web`.")
    return _serving.gateway.inference


def alone() -> bool:
    """Whether this process's gateway counts limits by itself because Valkey is away; False where there is none."""
    return _serving is not None and _serving.gateway.alone


def playground_principal(user: User, tenant_id: UUID | str) -> Principal:
    """In whose name a person's playground requests run. Uses the database: call it from a thread.

    Raises NotAllowed when the person may not send requests for this tenant.
    """
    tenant = usable_tenants(user).filter(pk=tenant_id).first()
    if tenant is None:
        raise NotAllowed("You cannot send requests in the name of this tenant.")
    key = ensure_playground_key(tenant)
    return Principal(
        key_id=str(key.id),
        key_name=key.name,
        tenant_id=str(tenant.id),
        tenant_name=tenant.name,
        source="playground",
        limits=key.limits(),
        tenant_limits=tenant.limits(),
        weight=tenant.weight,
        priority=lower(key.priority, tenant.priority),
        currency=tenant.currency,
        billing_zone=tenant.billing_zone,
        may_override=user.is_staff,
        capture_content=tenant.capture_content,
    )
