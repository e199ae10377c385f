"""Places for replicas: asks the ledger before a start, gives back after an end, and looks at the devices meanwhile."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import close_old_connections, connection

from console.catalog.models import Runtime
from console.errors import Refused, first_line
from console.fleet.models import Replica
from console.placement import queries
from console.placement.actions import place, releasing, sentence
from console.placement.inventory import Alarm, Inventory, Living, Look
from console.placement.ledger import Need
from console.placement.models import Device, Reservation
from console.placement.needs import kind_for, kind_here, need_of
from console.placement.planner import Plan
from engine.footprint import Footprint

log = logging.getLogger(__name__)

LOOK_S = 2.0
SOONEST_S = 0.5  # between two looks, where memory is waited for
RETRY_S = 2.0  # a replica without room asks again so often
ALARM_EVERY_S = 60.0  # the same one is logged again


@dataclass(frozen=True)
class Place:
    """Where a replica may run. `cores` empty: any; `gpus` empty: on the CPU. Bytes on each device."""

    devices: tuple[str, ...]
    cores: tuple[int, ...] = ()
    exclusive_cores: bool = True
    gpus: tuple[str, ...] = ()
    memory: int = 0
    kv_bytes: int = 0


class NoPlace(Exception):
    """There is no room now; the message is the planner's sentence."""


class Places:
    """Remembers who was refused, so that nobody asks four times a second.

    `full` are those of them for whom there will be no room by waiting: nobody's memory is being freed.
    """

    def __init__(self) -> None:
        self.refused: dict[UUID, str] = {}
        self.full: set[UUID] = set()
        self._asked_at: dict[UUID, float] = {}

    def due(self, replica_id: UUID, freed_at: float) -> bool:
        """Whether a replica that was refused may ask again; `freed_at` is when memory was freed last (monotonic)."""
        asked_at = self._asked_at.get(replica_id, 0.0)
        return replica_id not in self.refused or freed_at > asked_at or time.monotonic() - asked_at >= RETRY_S

    def find(
        self, replica: Replica, config: Mapping[str, Any], runtime: Runtime | None, threads: int, borrows: bool
    ) -> Place:
        """A place, kept in the ledger: the one that it has, unless a device of that is lost. Raises NoPlace."""
        self._asked_at[replica.id] = time.monotonic()
        lines = Reservation.objects.filter(replica_id=replica.id, state=Reservation.State.RESERVED)
        if lines.filter(device__lost_at__isnull=False).exists():
            releasing(replica.id, "Its device is lost")
        try:
            need = _need(replica, config, runtime, threads, borrows)
        except Refused as error:
            raise self._refusal(replica.id, str(error)) from None
        plan = place(need, replica_id=replica.id, deployment_id=replica.deployment_id, label=str(replica))
        if not plan.placed:
            raise self._refusal(replica.id, sentence(plan))
        self._ask_no_more(replica.id)
        return _place(plan)

    def give_back(self, replica: Replica, reason: str) -> None:
        """Its worker is gone, and it gets none for now."""
        self._ask_no_more(replica.id)
        releasing(replica.id, reason)

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for memory that is being freed."""
        return any(replica_id not in self.full for replica_id in self.refused)

    def _refusal(self, replica_id: UUID, reason: str) -> NoPlace:
        self.refused[replica_id] = reason
        if Reservation.objects.filter(state=Reservation.State.RELEASING).exists():
            self.full.discard(replica_id)
        else:
            self.full.add(replica_id)
        return NoPlace(reason)

    def _ask_no_more(self, replica_id: UUID) -> None:
        self.refused.pop(replica_id, None)
        self.full.discard(replica_id)

    def forget(self, known: Iterable[UUID]) -> None:
        """Of replicas that are no more, lines go the same way."""
        gone = Reservation.objects.filter(state=Reservation.State.RESERVED).exclude(replica_id__in=list(known))
        for replica_id in gone.values_list("replica_id", flat=True).distinct():
            releasing(replica_id, "Its replica is no more")


def _need(replica: Replica, config: Mapping[str, Any], runtime: Runtime | None, threads: int, borrows: bool) -> Need:
    deployment = replica.deployment
    kinds = kind_for(deployment.engine, runtime)
    kind = kind_here(deployment.engine, runtime, config.get("binding") or ())
    overhead = queries.learnt_overhead(deployment.engine, runtime.requirement if runtime else "", kind)
    known = {**config, "threads": threads}
    if not deployment.model.layers:  # registered by an older version, which read less of its files
        weights = deployment.model.weights_bytes or deployment.model.disk_bytes or 0
        return Need(
            model=deployment.model.name, engine=deployment.engine, peak=Footprint(weights, 0, 0, overhead or 0),
            deployment=str(deployment.pk), priority_class=str(config.get("priority_class") or "normal"), kinds=kinds,
            binding=tuple(config.get("binding") or ()), threads=threads, borrows=borrows,
        )  # fmt: skip
    return need_of(
        deployment.model, known, engine=deployment.engine, runtime=runtime, deployment=str(deployment.pk),
        overhead=overhead, borrows=borrows,
    )  # fmt: skip


def _place(plan: Plan) -> Place:
    devices = {device.uid: device for device in Device.objects.filter(uid__in=plan.devices)}
    real = [device for device in devices.values() if not device.simulated]
    share = plan.shares[0]
    return Place(
        devices=plan.devices,
        cores=share.cores if real else (),
        exclusive_cores=share.exclusive and bool(real),  # on a pretended card it runs on whatever core is there
        gpus=tuple(device.uid for device in real if device.kind == Device.Kind.GPU),
        memory=share.reserved,
        kv_bytes=plan.need.peak.kv,
    )


class Devices:
    """Looks at the devices every LOOK_S in a thread of its own: a driver that hangs keeps no replica waiting.

    `living` is told by the controller at each tick; `alarms` are the newest look's.
    """

    def __init__(self, inventory: Inventory | None = None) -> None:
        self._inventory = inventory
        self._lock = threading.Lock()
        self._living: dict[UUID, Living] | None = None
        self._alarms: tuple[Alarm, ...] = ()
        self._told: dict[tuple[str, str, UUID | None], float] = {}
        self._soon = threading.Event()
        self.freed_at = 0.0  # monotonic; when memory was seen to be free again
        self.pools: Mapping[UUID, float] = {}  # lender → share of its KV pool that its loans leave it

    def tell(self, living: Mapping[UUID, Living] | None) -> None:
        """Who lives now; None: another controller leads, and looks."""
        with self._lock:
            self._living = None if living is None else dict(living)
        if living is None:
            self.pools = {}

    def soon(self) -> None:
        """Somebody has gone, or waits for memory that is being freed: look before it is time."""
        self._soon.set()

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What the newest look found that somebody has to act on."""
        return self._alarms

    def run(self, stop: threading.Event) -> None:
        """Look until `stop` is set, for as long as this controller leads."""
        while not stop.wait(SOONEST_S):
            self._soon.wait(LOOK_S - SOONEST_S)
            self._soon.clear()
            if self._living is not None and not stop.is_set():
                try:
                    self.look()
                except DatabaseError as error:
                    log.warning("controller: devices could not be written: %s", first_line(error))
                    close_old_connections()
                except Exception:  # a driver's answer that nobody foresaw
                    log.exception("controller: devices could not be looked at; trying again")
        with contextlib.suppress(DatabaseError):
            connection.close()

    def look(self) -> Look:
        """Look once. Raises DatabaseError."""
        if self._inventory is None:
            self._inventory = Inventory()
        with self._lock:
            living = dict(self._living or {})
        found = self._inventory.look(living)
        self._alarms, self.pools = tuple(found.alarms), found.pools
        if found.released:
            self.freed_at = time.monotonic()
        for alarm in found.alarms:
            self._log(alarm)
        return found

    def _log(self, alarm: Alarm) -> None:
        key, now = (alarm.kind, alarm.device, alarm.replica_id), time.monotonic()
        if now - self._told.get(key, -ALARM_EVERY_S) >= ALARM_EVERY_S:
            self._told[key] = now
            log.warning("controller: %s: %s", alarm.kind, alarm.reason)


def with_stats(living: Living, stats: Mapping[str, Any]) -> Living:
    """A live worker with what it said last."""
    return replace(living, busy=stats.get("busy"), kv_usage=pool_usage(stats), kv_wanted=pool_wanted(stats))


def pool_usage(stats: Mapping[str, Any]) -> float | None:
    """Share of its whole KV pool that requests hold; of a lender `kv_usage` is of what its loans leave it."""
    if "held_blocks" in stats and stats.get("num_blocks"):
        return float(stats["held_blocks"]) / float(stats["num_blocks"])
    return stats.get("kv_usage")


def pool_wanted(stats: Mapping[str, Any]) -> float | None:
    """The same with what requests wait for, unless they wait for a slot: a pool that is kept small is never full."""
    usage = pool_usage(stats)
    if usage is None or stats.get("running", 0) >= stats.get("max_num_seqs", math.inf):
        return usage
    blocks = stats.get("waiting_tokens", 0) / max(1, stats.get("block_size", 1))
    return min(1.0, usage + blocks / stats["num_blocks"]) if stats.get("num_blocks") else usage
