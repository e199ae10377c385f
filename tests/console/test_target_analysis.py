"""Canaries and shadows as the controller judges them: by records in PostgreSQL, and behind a whole gateway."""

from __future__ import annotations

import asyncio
import math
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from django.core.management import call_command
from django.utils import timezone

from console.audit.actions import COMMAND_LINE
from console.audit.models import AuditEntry
from console.base.models import SnapshotVersion
from console.fleet import canary
from console.fleet.actions import ensure_replicas, move_replica
from console.fleet.models import Deployment, Replica, Route, RouteTarget, TargetAnalysis, Transition
from console.fleet.objectives import budget_left, objectives
from console.fleet.route_actions import set_route, set_target
from console.fleet.route_facts import route_facts
from console.telemetry import filters, queries
from console.telemetry.route_figures import measured
from console.telemetry.scope import Scope
from console.telemetry.windows import latest
from serving.port import Settled, Target
from tests.console.test_pages import signed_in
from tests.e2e.world import World, deliver, settled
from tests.e2e.world import world as world
from tests.serving.conftest import chat
from tests.serving.fakes import KEY, EngineCall, Stack, replica, running
from tests.serving.fakes import route as serving_route

pytestmark = pytest.mark.django_db
State = TargetAnalysis.State


class House:
    """The route of the world, with a second deployment beside its stable one."""

    def __init__(self, world: World, role: str, weight: int = 10) -> None:
        self.world = world
        self.stable = world.replica
        deployment = Deployment.objects.create(name="next", model=world.deployment.model)
        self.other = ensure_replicas(deployment)[0]
        move_replica(self.other, Replica.State.READY, "ready")
        self.route = Route.objects.get()
        self.target = set_target(COMMAND_LINE, self.route, deployment, {"role": role, "weight": weight})
        self.look()
        TargetAnalysis.objects.update(since=timezone.now() - timedelta(minutes=30))

    def look(self) -> TargetAnalysis:
        canary.look_at(Route.objects.get(pk=self.route.pk))
        self.target.refresh_from_db()
        return TargetAnalysis.objects.get(target=self.target)

    def saw(self, count: int, where: Replica, role: str, **changes: Any) -> None:
        one = {"role": role, "body": {}} | changes
        deliver(*(settled(self.world.aurora, self.world.key, where, **one) for _ in range(count)))


@pytest.fixture
def house(world: World) -> House:
    return House(world, "canary")


def moves() -> list[tuple[str, str]]:
    return list(Transition.objects.filter(subject_type="route").order_by("id").values_list("old", "new"))


def test_a_canary_that_fails_loses_its_share_with_the_numbers_that_say_why(house: House) -> None:
    house.saw(60, house.stable, "stable")
    house.saw(12, house.other, "canary", outcome="error", status=502)
    before = SnapshotVersion.objects.get().version
    analysis = house.look()
    assert (house.target.weight, house.target.role, analysis.state) == (0, "canary", State.ROLLED_BACK)
    assert SnapshotVersion.objects.get().version == before + 1
    assert "12 of 12 requests of the canary (100.00%), 0 of 60 of stable" in analysis.reason
    assert analysis.measures[0]["canary"] == [12, 12] and analysis.measures[0]["name"] == "errors"
    assert moves() == [("", "running"), ("running", "rolled_back")]
    entry = AuditEntry.objects.order_by("-id")[0]
    assert (entry.actor_label, entry.action) == ("controller", "route.rollback")
    assert entry.details == {"deployment": "next", "reason": analysis.reason, "weight": [10, 0]}
    house.look()
    assert len(moves()) == 2  # done is done


def test_a_share_given_again_is_judged_by_what_comes_then(house: House) -> None:
    house.saw(60, house.stable, "stable")
    house.saw(12, house.other, "canary", outcome="error", status=502)
    house.look()
    set_target(COMMAND_LINE, house.route, house.other.deployment, {"weight": 10})
    house.look()
    assert house.look().state == State.RUNNING and house.target.weight == 10
    assert moves()[2:] == [("rolled_back", "running")]


def test_a_healthy_canary_passes_once_and_figures_are_kept_without_transitions(house: House) -> None:
    house.saw(20, house.other, "canary")
    assert house.look().state == State.RUNNING
    version = SnapshotVersion.objects.get().version
    house.saw(500, house.stable, "stable")
    house.saw(500, house.other, "canary")
    assert house.look().state == State.PASSED
    house.saw(8, house.other, "canary", outcome="error", status=502)  # not enough against it, too many to pass anew
    analysis = house.look()
    assert (analysis.state, analysis.measures[0]["canary"]) == (State.PASSED, [528, 8])
    assert moves() == [("", "running"), ("running", "passed")]
    assert SnapshotVersion.objects.get().version == version  # no gateway is made to read anything


def test_first_tokens_that_come_too_late_take_a_canary_out(house: House) -> None:
    set_route(COMMAND_LINE, house.route, {"objective_ttft_p99_ms": 300})
    house.saw(100, house.stable, "stable")
    house.saw(25, house.other, "canary", ttft_us=301_000)
    analysis = house.look()
    assert analysis.state == State.ROLLED_BACK and analysis.reason.startswith("ttft: 25 of 25")


def test_what_says_nothing_of_a_target_is_not_held_against_it(house: House) -> None:
    house.saw(60, house.stable, "stable")
    for outcome, status in (("cancelled", 499), ("rejected", 400), ("slow_reader", 500), ("gateway_lost", 500)):
        house.saw(10, house.other, "canary", outcome=outcome, status=status)
    house.saw(40, house.other, "canary", model="another", outcome="error", status=502)
    house.saw(40, house.other, "canary", age=3600, outcome="error", status=502)  # before it was a canary
    analysis = house.look()
    assert (analysis.state, analysis.measures[0]["canary"]) == (State.RUNNING, [0, 0])


def test_an_attempt_that_was_answered_elsewhere_counts_where_it_failed(house: House) -> None:
    house.saw(60, house.stable, "stable")
    failed = {"replica_id": str(house.other.id), "error": "engine_error", "t": 5}
    house.saw(12, house.stable, "stable", attempts=3, body={"attempts": [failed, failed]})
    busy = failed | {"error": "engine_overloaded"}
    house.saw(12, house.stable, "stable", attempts=2, body={"attempts": [busy]})
    analysis = house.look()
    assert (analysis.measures[0]["canary"], analysis.measures[0]["stable"]) == ([12, 12], [84, 0])
    assert analysis.state == State.ROLLED_BACK


def test_a_shadow_is_judged_and_keeps_its_share(world: World) -> None:
    house = House(world, "shadow", 50)
    house.saw(60, house.stable, "stable")
    house.saw(30, house.other, "shadow", outcome="error", status=502)
    analysis = house.look()
    assert (analysis.state, house.target.weight) == (State.FAILING, 50)
    assert not AuditEntry.objects.filter(action="route.rollback").exists()


def test_a_canary_stays_while_nobody_could_take_over(house: House) -> None:
    house.saw(60, house.stable, "stable")
    house.saw(12, house.other, "canary", outcome="error", status=502)
    move_replica(house.stable, Replica.State.FAILED, "died")
    assert house.look().state == State.FAILING and house.target.weight == 10
    move_replica(house.stable, Replica.State.READY, "back")
    assert house.look().state == State.ROLLED_BACK and house.target.weight == 0


def test_a_weight_that_somebody_changed_meanwhile_is_left_alone(house: House) -> None:
    house.saw(60, house.stable, "stable")
    house.saw(12, house.other, "canary", outcome="error", status=502)
    analysis = TargetAnalysis.objects.select_related("target").get()
    set_target(COMMAND_LINE, house.route, house.other.deployment, {"weight": 20})
    assert not canary.roll_back(analysis, "late", [], timezone.now())
    house.target.refresh_from_db()
    assert house.target.weight == 20


@pytest.mark.parametrize("pause", [{"weight": 0}, {"role": "stable"}])
def test_the_same_weight_after_a_pause_begins_anew(house: House, pause: dict[str, Any]) -> None:
    began = TargetAnalysis.objects.get().since
    set_target(COMMAND_LINE, house.route, house.other.deployment, pause)
    canary.Canaries().look()
    assert TargetAnalysis.objects.get().since == began
    set_target(COMMAND_LINE, house.route, house.other.deployment, {"weight": 10, "role": "canary"})
    canary.Canaries().look()
    assert TargetAnalysis.objects.get().since > began


def test_the_controller_looks_at_every_route_and_not_at_every_tick(house: House) -> None:
    house.saw(60, house.stable, "stable")
    house.saw(12, house.other, "canary", outcome="error", status=502)
    canaries = canary.Canaries()
    canaries.look()
    house.target.refresh_from_db()
    assert house.target.weight == 0
    canaries._due = math.inf
    set_target(COMMAND_LINE, house.route, house.other.deployment, {"weight": 10})
    canaries.look()
    assert TargetAnalysis.objects.get().state == State.ROLLED_BACK


# ---- a whole gateway and two engines -------------------------------------------------------------------------------


async def broken(call: EngineCall) -> None:
    await call.refuse(500, "broken")


def told(stack: Stack, house: House) -> None:
    """Give the gateway what the database says."""
    rows = RouteTarget.objects.filter(weight__gt=0)
    targets = tuple(Target(str(t.deployment_id), t.weight, t.role) for t in rows)
    replicas = [
        replica(engine.path, id=str(row.id), deployment_id=str(row.deployment_id), deployment_name=row.deployment.name)
        for engine, row in zip(stack.engines, (house.stable, house.other), strict=True)
    ]
    name = house.route.name
    stack.snapshots.change(
        routes={name: serving_route(name=name, targets=targets, sticky=False, prices={})},
        replicas={each.id: each for each in replicas},
    )


async def asked(stack: Stack, model: str, count: int) -> list[int]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=10, verify=False) as client:
        body = chat(model=model, stream=True)
        return [(await client.post("/v1/chat/completions", json=body)).status_code for _ in range(count)]


def shipped(entries: Sequence[Settled]) -> None:
    """Into the database, as of nobody: the gateway's tenants are not the console's."""
    nobody = {"tenant_id": None, "key_id": None}
    deliver(
        *(msgspec.structs.replace(e, usage=None, record=msgspec.structs.replace(e.record, **nobody)) for e in entries)
    )


@pytest.mark.parametrize("fails", [True, False])
def test_behind_a_gateway_a_bad_canary_is_rolled_back_and_a_good_one_passes(world: World, fails: bool) -> None:
    house = House(world, "canary", 100)
    name = house.route.name
    with tempfile.TemporaryDirectory(prefix="fl-") as path, asyncio.Runner() as runner:
        stack_of = AsyncExitStack()
        stack = runner.run(stack_of.enter_async_context(running(Path(path), engines=2)))
        try:
            told(stack, house)
            if fails:
                stack.engines[1].script = broken
            assert set(runner.run(asked(stack, name, 40 if fails else 800))) == {200}  # retries hide it from clients
            shipped(runner.run(stack.settled()))
            analysis = house.look()
            assert stack.engines[1].calls and analysis.measures[0]["canary"][0] >= 5
            assert analysis.state == (State.ROLLED_BACK if fails else State.PASSED)
            told(stack, house)
            before = [len(engine.calls) for engine in stack.engines]
            assert set(runner.run(asked(stack, name, 20))) == {200}
            grown = [len(engine.calls) - had for engine, had in zip(stack.engines, before, strict=True)]
            assert sum(grown) == 20 and (grown == [20, 0] if fails else grown[1] > 0)
            last = runner.run(stack.settled())[-20:]
            assert not fails or {each.record.attempts for each in last} == {1}
        finally:
            runner.run(stack_of.aclose())


# ---- what people see -----------------------------------------------------------------------------------------------


def test_the_route_page_and_the_command_tell_how_a_canary_does(house: House) -> None:
    house.saw(60, house.stable, "stable")
    house.saw(12, house.other, "canary", outcome="error", status=502)
    analysis = house.look()
    page = signed_in(house.world.admin).get(f"/routes/{house.route.id}/").content.decode()
    assert "rolled back" in page and analysis.reason in page and "evidence against it" in page
    out = StringIO()
    call_command("route", "show", house.route.name, stdout=out)
    assert f"next  canary 0  rolled_back since {analysis.since.isoformat()}: {analysis.reason}" in out.getvalue()
    stable, other = route_facts(house.route)["targets"]
    assert "analysis" not in stable and other["analysis"]["measures"] == analysis.measures


def test_objectives_are_measured_with_the_budget_that_is_left(house: House) -> None:
    set_route(COMMAND_LINE, house.route, {"objective_availability": 0.9, "objective_ttft_p99_ms": 250})
    house.saw(95, house.stable, "stable", itl_p50_us=20_000, itl_p99_us=50_000)
    house.saw(4, house.stable, "stable", outcome="error", status=502, ttft_us=None, itl_p50_us=None, itl_p99_us=None)
    house.saw(1, house.stable, "", outcome="rejected", status=503, ttft_us=None, itl_p50_us=None, itl_p99_us=None)
    house.saw(30, house.stable, "", outcome="rejected", status=429, ttft_us=None, itl_p50_us=None, itl_p99_us=None)
    house.saw(50, house.other, "shadow", outcome="error", status=502, ttft_us=9_000_000)
    house.saw(5, house.stable, "stable", age=7200, ttft_us=300_000, itl_p50_us=20_000, itl_p99_us=50_000)
    route = Route.objects.get()
    found = [(key, measured(route.name, latest(key), 250.0, None)) for key in ("1h", "24h")]
    availability, ttft, itl, jitter = objectives(route, found)
    hour, day = availability.attained
    assert (hour.value, hour.requests, hour.kept) == (pytest.approx(0.95), 100, True)
    assert hour.budget_left == pytest.approx(0.5) and day.requests == 105
    assert (ttft.attained[0].kept, ttft.attained[0].budget_left) == (True, 1.0)
    assert ttft.attained[1].kept is False and ttft.attained[1].budget_left == pytest.approx(1 - 5 / 1.0)
    assert (itl.attained[0].value, itl.attained[0].kept) == (50.0, None)
    assert jitter.attained[0].value == pytest.approx(2.5)
    page = signed_in(house.world.admin).get(f"/routes/{route.id}/").content.decode()
    assert "50 % of the error budget left" in page and "-400 % of the error budget left" in page


@pytest.mark.parametrize(
    ("requests", "bad", "allowed", "left"),
    [(100, 0, 0.01, 1.0), (100, 1, 0.01, 0.0), (100, 3, 0.01, -2.0), (100, 0, 0.0, 1.0), (100, 2, 0.0, -2.0)],
)
def test_an_error_budget(requests: int, bad: int, allowed: float, left: float) -> None:
    assert budget_left(requests, bad, allowed) == pytest.approx(left)


def test_copies_for_shadows_are_in_no_total(world: World) -> None:
    deliver(settled(world.aurora, world.key, world.replica, role="stable"))
    copy = settled(world.aurora, world.key, world.replica, role="shadow", ttft_us=9_000_000)
    (shadow,) = deliver(msgspec.structs.replace(copy, usage=None))
    everything, hour = Scope(None), latest("1h", timezone.now() + timedelta(seconds=2))
    told = queries.traffic(everything, hour)
    assert told.total.requests == sum(each.requests for each in told.slices) == 1
    assert queries.rate(everything, timezone.now() + timedelta(seconds=2)).seen == 1
    assert len(queries.slowest(everything, hour)) == len(queries.page(everything, hour).records) == 1
    summary = queries.summary(everything, hour, ())
    assert (summary.matching, summary.total) == (1, 1)
    histogram = queries.histogram(everything, hour, ())
    assert histogram is not None and sum(histogram.counts) == 1
    assert [each.requests for each in queries.groups(everything, hour, (), "replica")] == [1]
    assert sum(len(rows) for rows in queries.export(everything, hour, ())) == 1
    assert measured("smollm2", hour, None, None).availability == (1, 0)
    asked_for = filters.parse("role:shadow")
    assert [str(each.id) for each in queries.page(everything, hour, asked_for).records] == [shadow]
    assert queries.summary(everything, hour, asked_for).matching == 1
    assert queries.record(everything, uuid.UUID(shadow)) is not None  # its page can still be opened
