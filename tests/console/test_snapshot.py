"""What gateways run on: fresh within a poll, kept on disk, never emptied by a database that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connections

from console.audit.actions import COMMAND_LINE
from console.catalog.models import Model
from console.fleet import snapshot
from console.fleet.actions import deploy, ensure_replicas, move_replica
from console.fleet.models import Replica, Transition
from console.fleet.snapshot import DatabaseSnapshots
from console.keys.actions import create_key, revoke_key, server_secret
from console.tenants.actions import create_tenant
from serving import apikey
from serving.port import Snapshot

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
async def _close_the_threads_connection() -> AsyncIterator[None]:
    """sync_to_async runs queries in a thread whose connection nobody else closes."""
    yield
    await sync_to_async(connections.close_all)()


async def until(source: DatabaseSnapshots, check: Any) -> Snapshot:
    async with asyncio.timeout(10):
        while not check(source.current()):
            await asyncio.sleep(0.01)
    return source.current()


def make_fleet() -> Replica:
    model = Model.objects.create(name="Tiny", source="file:tiny", context_length=512)
    deployment = deploy(COMMAND_LINE, model, "tiny", "tiny-route")
    return ensure_replicas(deployment)[0]


async def test_a_key_is_known_and_its_revocation_too(tmp_path: Path) -> None:
    source = DatabaseSnapshots(tmp_path / "snapshot.json")
    await source.start()
    try:
        tenant = await sync_to_async(create_tenant)(COMMAND_LINE, "aurora")
        made = await sync_to_async(create_key)(COMMAND_LINE, tenant, "bot", ["tiny-route"])
        digest = apikey.digest(made.secret, server_secret())
        seen = await until(source, lambda s: digest in s.keys)
        assert seen.keys[digest].tenant_name == "aurora"
        assert seen.keys[digest].allowed_models == ("tiny-route",)
        await sync_to_async(revoke_key)(COMMAND_LINE, made.key)
        await until(source, lambda s: s.keys[digest].revoked)
    finally:
        await source.stop()


async def test_only_ready_and_draining_replicas_are_in_it(tmp_path: Path) -> None:
    source = DatabaseSnapshots(tmp_path / "snapshot.json")
    await source.start()
    try:
        replica = await sync_to_async(make_fleet)()
        seen = await until(source, lambda s: "tiny-route" in s.routes)
        assert seen.routes["tiny-route"].max_model_len == 512
        assert not seen.replicas
        await sync_to_async(move_replica)(replica, "ready", "tested", uds="/s.sock", facts={"max_num_seqs": 4})
        seen = await until(source, lambda s: bool(s.replicas))
        assert seen.replicas[str(replica.id)].max_num_seqs == 4
        await sync_to_async(move_replica)(replica, "failed", "killed")
        await until(source, lambda s: not s.replicas)
    finally:
        await source.stop()
    assert await sync_to_async(list)(Transition.objects.values_list("new", flat=True)) == [
        "failed",
        "ready",
    ]


async def test_a_start_without_the_database_uses_the_kept_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "snapshot.json"
    first = DatabaseSnapshots(kept)
    await first.start()
    await sync_to_async(make_fleet)()
    await until(first, lambda s: bool(s.routes))
    await first.stop()
    assert kept.stat().st_mode & 0o777 == 0o600

    async def refuse() -> None:
        raise psycopg.OperationalError("connection refused")

    monkeypatch.setattr(snapshot, "connect", refuse)
    second = DatabaseSnapshots(kept)
    starting = asyncio.create_task(second.start())
    assert second.current().routes.keys() == first.current().routes.keys()
    assert second.current().taken_at <= first.current().taken_at
    starting.cancel()
    await second.stop()


@pytest.mark.parametrize("text", ["", "{", '["0.0.0", {}]'])
async def test_a_damaged_or_foreign_copy_counts_as_none(tmp_path: Path, text: str) -> None:
    kept = tmp_path / "snapshot.json"
    kept.write_text(text)
    assert DatabaseSnapshots(kept).current().version == 0
