"""What gateways run on: fresh within a poll, kept on disk, never emptied by a database that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from console.audit.actions import COMMAND_LINE
from console.base.models import SnapshotVersion
from console.catalog.models import Model
from console.fleet import snapshot
from console.fleet.actions import deploy, ensure_replicas, move_replica
from console.fleet.models import Deployment, Replica, Route, Transition
from console.fleet.route_actions import set_fallbacks, set_route, set_target
from console.fleet.snapshot import DatabaseSnapshots
from console.keys.actions import create_key, revoke_key, server_secret
from console.pricing.actions import set_price
from console.tenants.actions import create_tenant, set_limits
from serving import apikey
from serving.port import Budget, Limits, Price, Snapshot

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


def priced_route() -> Replica:
    """A route with everything set, as the actions write it."""
    replica = make_fleet()
    route = Route.objects.get(name="tiny-route")
    spare = Deployment.objects.create(name="spare", model=replica.deployment.model)
    set_route(COMMAND_LINE, route, {"policy": "prefix-aware", "hedge_after_s": 0.5, "objective_ttft_p99_ms": 300})
    set_target(COMMAND_LINE, route, spare, {"role": "shadow", "weight": 5})
    set_fallbacks(COMMAND_LINE, route, ["spare"])
    set_price(COMMAND_LINE, {"model": "tiny-route", "currency": "USD", "input": "0.15", "output": "0.6"})
    later = timezone.now() + timedelta(seconds=1)
    euro = {"model": "tiny-route", "currency": "EUR", "input": "1", "cached_input": "0.000001", "output": "2"}
    set_price(COMMAND_LINE, {**euro, "effective_at": later})
    return replica


async def test_a_route_carries_its_rules_targets_fallbacks_and_prices(tmp_path: Path) -> None:
    source = DatabaseSnapshots(tmp_path / "snapshot.json")
    await source.start()
    try:
        replica = await sync_to_async(priced_route)()
        written = (await SnapshotVersion.objects.aget()).version
        seen = await until(source, lambda s: s.version == written)
        route = seen.routes["tiny-route"]
        assert (route.policy, route.hedge_after_s, route.objectives.ttft_p99_ms) == ("prefix-aware", 0.5, 300)
        stable, shadow = route.targets
        assert (stable.deployment_id, stable.role) == (str(replica.deployment_id), "stable")
        assert (shadow.weight, shadow.role) == (5, "shadow")
        assert route.fallbacks == (shadow.deployment_id,)
        assert route.prices["USD"] == Price(
            version=1, currency="USD", input=150_000, cached_input=150_000, output=600_000
        )
        # A planned price comes into force without any write.
        later = await until(source, lambda s: "EUR" in s.routes["tiny-route"].prices)
        assert later.routes["tiny-route"].prices["EUR"].cached_input == 1
        assert later.version == written
    finally:
        await source.stop()


def asleep(replica: Replica) -> None:
    """Its deployment is stopped because nobody asks."""
    deployment = replica.deployment
    Replica.objects.filter(pk=replica.pk).update(state="stopped")
    for name, value in {"desired_replicas": 0, "min_replicas": 0, "autoscale": True, "start_s": 42.0}.items():
        setattr(deployment, name, value)
    deployment.save()


async def test_a_sleeping_deployment_can_be_woken_and_a_starting_one_says_since_when(tmp_path: Path) -> None:
    source = DatabaseSnapshots(tmp_path / "snapshot.json")
    await source.start()
    try:
        replica = await sync_to_async(priced_route)()
        key = str(replica.deployment_id)
        await sync_to_async(asleep)(replica)
        seen = await until(source, lambda s: key in s.deployments and s.deployments[key].wakes)
        assert (seen.deployments[key].starting_at, seen.deployments[key].start_s) == (None, 42.0)
        begun = timezone.now()
        await Replica.objects.filter(pk=replica.pk).aupdate(state="loading", started_at=begun)
        seen = await until(source, lambda s: s.deployments[key].starting_at is not None)
        assert seen.deployments[key].starting_at == pytest.approx(begun.timestamp(), abs=1e-3)
        assert not seen.deployments[key].between, "a first start is told when to come back"
        await Deployment.objects.filter(pk=replica.deployment_id).aupdate(desired_replicas=1)
        await Replica.objects.filter(pk=replica.pk).aupdate(state="failed", failures=1)
        await until(source, lambda s: s.deployments[key].between)
        await Replica.objects.filter(pk=replica.pk).aupdate(state="failed", failures=4)
        await until(source, lambda s: not s.deployments[key].between)
        await Replica.objects.filter(pk=replica.pk).aupdate(state="draining", failures=0, wanted=False)
        await until(source, lambda s: s.deployments[key].between)
    finally:
        await source.stop()


async def test_a_key_carries_its_limits_and_its_tenants(tmp_path: Path) -> None:
    source = DatabaseSnapshots(tmp_path / "snapshot.json")
    await source.start()
    try:
        tenant = await sync_to_async(create_tenant)(COMMAND_LINE, "aurora", currency="EUR", billing_zone="Asia/Tokyo")
        limits = {"requests_per_minute": 5, "budget_total": "0.000000001", "priority": "high", "may_override": True}
        made = await sync_to_async(create_key)(COMMAND_LINE, tenant, "bot", limits=limits)
        digest = apikey.digest(made.secret, server_secret())
        await until(source, lambda s: digest in s.keys)
        terms = {"concurrency": 2, "weight": 7, "capture_content": True}
        await sync_to_async(set_limits)(COMMAND_LINE, tenant, terms)
        seen = await until(source, lambda s: s.keys[digest].weight == 7)
        principal = seen.keys[digest]
        assert principal.limits == Limits(requests_per_minute=5, budgets=(Budget("total", 1),))
        assert principal.tenant_limits == Limits(concurrency=2)
        assert (principal.priority, principal.currency, principal.billing_zone) == ("normal", "EUR", "Asia/Tokyo")
        assert principal.may_override
        assert principal.capture_content
    finally:
        await source.stop()
    again = DatabaseSnapshots(tmp_path / "snapshot.json")
    assert again.current().keys == seen.keys
