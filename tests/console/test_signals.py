"""Signals by the minute, and what the autoscaler does with them: rows, decisions, audit entries, wakes."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from console.audit.actions import COMMAND_LINE
from console.audit.models import AuditEntry
from console.catalog.models import Model
from console.fleet import live
from console.fleet.actions import deploy
from console.fleet.models import Deployment, Replica, ScaleDecision, SignalSample
from console.fleet.signals import WAKE, Group, Signals
from console.telemetry import partitions
from console.telemetry.demand import Demand, demand

pytestmark = pytest.mark.django_db

BEGAN = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
Kind = ScaleDecision.Verdict


@pytest.fixture
def deployment(embedded_servers: None) -> Deployment:
    model = Model.objects.create(name="Fake", source="file:fake", path="/fake", sha256="0" * 64)
    made = deploy(COMMAND_LINE, model, "fake", "fake")
    Deployment.objects.filter(pk=made.pk).update(
        autoscale=True, min_replicas=0, max_replicas=3, scale_up_after_s=120, scale_down_after_s=180, cool_down_s=60
    )
    Replica.objects.create(deployment=made, ordinal=1, state=Replica.State.READY, devices=[])
    return Deployment.objects.get(pk=made.pk)


class Clock:
    """Minutes that pass, each with the same number from every worker."""

    def __init__(self) -> None:
        self.signals = Signals()
        self.at = BEGAN.timestamp()

    def minutes(self, count: int, busy: float | None) -> None:
        for _ in range(count):
            for second in (10, 30, 50):
                self._look(self.at + second, busy)
            self.at += 60
        self._look(self.at + 6, busy)

    def _look(self, at: float, busy: float | None) -> None:
        groups, stats = [], {}
        for deployment in Deployment.objects.all():
            replicas = tuple(Replica.objects.filter(deployment=deployment))
            groups.append(Group(deployment, replicas))
            stats |= {str(replica.id): {} if busy is None else {"busy": busy} for replica in replicas}
        self.signals.look(groups, stats, at)


def decisions() -> list[tuple[str, str, int, int]]:
    rows = ScaleDecision.objects.order_by("id")
    return [(row.verdict, row.code, row.before, row.after) for row in rows]


def request(deployment_id: uuid.UUID | None, at: datetime, **columns: Any) -> None:
    """A row of telemetry, as the shipper would write it."""
    values = {
        "id": uuid.uuid4(), "started_at": at, "source": "api", "endpoint": "chat", "model": "fake", "stream": True,
        "outcome": "ok", "status": 200, "code": "", "finish_reason": "", "deployment_id": deployment_id, "device": "",
        "attempts": 1, "prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1, "duration_us": 1,
        "gateway_us": 0, "queue_us": 0, "engine_queue_us": 0, "prefill_us": 0, "decode_us": 0, "unattributed_us": 0,
        "preemptions": 0, "end_user": "", "client_request_id": "", "trace_id": "", "gateway": "", "gateway_version": "",
        "snapshot_version": 0, "engine_version": "", "role": "", **columns,
    }  # fmt: skip
    names, marks = ", ".join(values), ", ".join(["%s"] * len(values))
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO telemetry_requestrecord ({names}) VALUES ({marks})", list(values.values()))


def test_busy_minutes_become_samples_and_one_more_replica(deployment: Deployment) -> None:
    Clock().minutes(2, 0.9)
    samples = list(SignalSample.objects.all())
    assert [sample.replicas for sample in samples] == [1, 1]
    assert [round(sample.busy or 0, 3) for sample in samples] == [0.9, 0.9]
    assert decisions()[-1] == (Kind.UP, "busy", 1, 2)
    assert Deployment.objects.get().desired_replicas == 2
    row = ScaleDecision.objects.first()
    assert row is not None
    assert row.reason == "Busy over 70 % for 2 min (mean 90 %)"
    assert row.signal["value"] == pytest.approx(0.9)
    entry = AuditEntry.objects.get(action="deployment.scale")
    assert (entry.actor_label, entry.details["desired_replicas"]) == ("autoscaler", [1, 2])


def test_a_held_decision_is_kept_once(deployment: Deployment) -> None:
    Deployment.objects.update(max_replicas=1)
    Clock().minutes(6, 0.9)
    assert [code for _kind, code, _before, _after in decisions()].count("at_max") == 1
    clock = Clock()
    clock.at += 3600
    clock.minutes(3, 0.99)
    newest = ScaleDecision.objects.first()
    assert newest is not None
    assert newest.code == "at_max"
    assert "latency is bending" in newest.signal["warning"], "a warning is news"
    assert Deployment.objects.get().desired_replicas == 1


def test_the_last_replica_sleeps_when_nobody_asked_and_a_request_wakes_it(deployment: Deployment) -> None:
    clock = Clock()
    clock.minutes(3, 0.0)
    assert decisions()[-1] == (Kind.SLEEP, "idle", 1, 0)
    with live.client() as valkey:
        valkey.set(f"{WAKE}{deployment.id}", "1", ex=60)
        clock._look(clock.at + 7, None)
        assert not valkey.exists(f"{WAKE}{deployment.id}")
    assert decisions()[-1] == (Kind.WAKE, "asked", 0, 1)
    assert Deployment.objects.get().desired_replicas == 1


def test_a_deployment_that_somebody_stopped_is_not_woken(deployment: Deployment) -> None:
    Deployment.objects.update(autoscale=False, desired_replicas=0)
    with live.client() as valkey:
        valkey.set(f"{WAKE}{deployment.id}", "1", ex=5)
        Clock()._look(BEGAN.timestamp(), None)
        valkey.delete(f"{WAKE}{deployment.id}")
    assert decisions() == []


def test_a_new_leader_goes_on_from_the_same_minutes(deployment: Deployment) -> None:
    clock = Clock()
    clock.minutes(1, 0.9)
    clock.signals = Signals()
    clock._look(clock.at + 7, 0.9)
    clock.minutes(1, 0.9)
    assert decisions()[-1][0] == Kind.UP


def test_a_number_that_somebody_changed_meanwhile_stands(deployment: Deployment) -> None:
    clock = Clock()
    clock.minutes(1, 0.9)
    stale = Group(deployment, tuple(Replica.objects.all()))
    SignalSample.objects.create(deployment=deployment, minute=BEGAN + timedelta(minutes=1), replicas=1, busy=0.9)
    Deployment.objects.update(desired_replicas=3)
    clock.signals._decide(stale, clock.at + 60)
    assert Deployment.objects.get().desired_replicas == 3
    assert Kind.UP not in [kind for kind, *_rest in decisions()]


def test_old_samples_go(deployment: Deployment) -> None:
    for days in (6, 8):
        SignalSample.objects.create(deployment=deployment, minute=BEGAN - timedelta(days=days), replicas=1)
    Clock().minutes(1, 0.5)
    assert SignalSample.objects.count() == 2


def test_what_was_asked_is_counted_by_deployment_and_who_gave_up_counts_too(deployment: Deployment) -> None:
    partitions.ensure_for(BEGAN.date())
    for at in range(19):
        request(deployment.id, BEGAN + timedelta(seconds=at), queue_us=1_000_000)
    request(deployment.id, BEGAN + timedelta(seconds=20), queue_us=9_000_000, role="shadow")
    request(deployment.id, BEGAN + timedelta(minutes=2))
    routes = {deployment.id: frozenset({"fake"})}
    window = (BEGAN, BEGAN + timedelta(minutes=1))
    assert demand(*window, routes) == {deployment.id: Demand(19, 1.0)}
    request(None, BEGAN + timedelta(seconds=30), code="queue_timeout", queue_us=10_000_000, requests=4, attempts=0)
    request(None, BEGAN + timedelta(seconds=30), code="invalid_api_key", requests=9, attempts=0)
    assert demand(*window, routes) == {deployment.id: Demand(23, 10.0)}
    assert demand(*window, {deployment.id: frozenset()}) == {deployment.id: Demand(19, 1.0)}
