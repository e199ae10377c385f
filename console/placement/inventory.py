"""Looks at the devices: what there is, what each shows, whose bytes are whose; and settles the ledger with what it saw.

The controller calls `Inventory.look` every two seconds with its live workers. Rows change in one transaction that locks
devices in the same order as `place`, so that a look and a decision never cross.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from console.placement import queries
from console.placement.actions import release
from console.placement.ledger import Card, left_behind, pressed
from console.placement.models import Device, DeviceMinute, Node, Overhead, Reservation
from console.placement.words import gib
from console.version import version
from engine.devices import DeviceFacts, Measured, Occupant, Provider, providers
from engine.devices.processes import trees

ORPHANED_AFTER_S = 60.0
"""A worker that is gone for so long, and whose memory still shows: its bytes are nobody's from then on."""
KEEP_MINUTES = timedelta(hours=24)
WRITE_EVERY = timedelta(seconds=10)
"""A device that shows nothing new is written so seldom."""
RUNS = 8
"""How many runs the mean of an overhead follows."""
_OF_THE_MOMENT = frozenset(("kv_used", "kv_wanted"))  # of what an engine tells: old ones mean nothing
State = Reservation.State


@dataclass(frozen=True, slots=True)
class Living:
    """A live worker: the root of its process tree, and what it tells of itself, as far as it has said.

    `runtime` is the requirement of its runtime, or empty for the embedded engine; `busy` its share of time at work.
    """

    pid: int
    ready: bool = False
    busy: float | None = None
    weights_bytes: int = 0
    kv_bytes: int = 0  # of the whole pool
    kv_usage: float | None = None  # share of the whole pool that its requests hold, 0 to 1
    kv_wanted: float | None = None  # and with those that wait for room in it
    runtime: str = ""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that somebody has to act on. `replica_id` is who: of "pressed" the borrower that must be drained."""

    kind: str  # "pressed", "over", "orphan", "lost"
    device: str  # uid
    reason: str
    replica_id: UUID | None = None


@dataclass(slots=True)
class Look:
    """What one look found and changed."""

    alarms: list[Alarm] = field(default_factory=list)
    released: list[UUID] = field(default_factory=list)  # replicas whose line was closed
    pools: dict[UUID, float] = field(default_factory=dict)  # lender → share of its KV pool that its loans leave it


class Inventory:
    """Remembers between looks only what the database does not: providers, and who is gone since when."""

    def __init__(
        self,
        spec: str | None = None,
        *,
        sources: Sequence[Provider] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = providers(spec or settings.ENV["DEVICES"]) if sources is None else list(sources)
        self._clock = clock
        self._gone: dict[UUID, float] = {}  # line → since when it has no process
        self._taught: set[tuple[UUID, int]] = set()  # replica and pid whose overhead was learnt
        self._minute: dict[UUID, DeviceMinute] = {}

    def look(self, workers: Mapping[UUID, Living]) -> Look:
        """Measure everything once. Raises django.db.Error, with nothing changed."""
        facts = {one.uid: one for source in self._sources for one in source.inventory()}
        families = trees(worker.pid for worker in workers.values())
        found = Look()
        with translation.override("en"), transaction.atomic():
            devices = self._known(facts, found)
            lines = list(Reservation.objects.filter(state__in=queries.LIVE).order_by("created_at"))
            seen = self._measure(devices, lines, workers, families)
            now = timezone.now()
            self._note_devices(devices, seen, families, now)
            self._note_lines(devices, lines, seen, workers)
            self._settle(devices, lines, seen, workers, families, found)
            self._warn(devices, lines, found)
            self._keep_minutes(devices.values(), seen, now)
        return found

    # -- devices ------------------------------------------------------------------------------------------------------

    def _known(self, facts: Mapping[str, DeviceFacts], found: Look) -> dict[UUID, Device]:
        """Rows of all devices by id, locked; new ones are made, those that are not there any more are lost."""
        rows = Device.objects.select_for_update(of=("self",)).select_related("node").order_by("node__name", "index")
        known = {row.uid: row for row in rows}
        new = [one for uid, one in facts.items() if uid not in known]
        if new:
            self._add(new)
            known = {row.uid: row for row in rows.all()}
        for uid, row in known.items():
            if uid not in facts and row.lost_at is None:
                row.lost_at = timezone.now()
                row.save(update_fields=["lost_at"])
                if row.reservations.filter(state__in=queries.LIVE).exists():
                    found.alarms.append(Alarm("lost", uid, _("{card} is not there any more.").format(card=row)))
            elif uid in facts:
                _update(row, facts[uid])
        return {row.id: row for row in known.values()}

    @staticmethod
    def _add(new: Sequence[DeviceFacts]) -> None:
        names = {one.node for one in new}
        for name in names:
            here = [one for one in new if one.node == name]
            Node.objects.get_or_create(
                name=name,
                defaults={
                    "simulated": all(one.simulated for one in here),
                    "cores": sum(len(one.cores) for one in here),
                    "memory_bytes": sum(one.total_bytes for one in here if one.kind == "cpu"),
                },
            )
        nodes = {node.name: node for node in Node.objects.filter(name__in=names)}
        Device.objects.bulk_create(
            Device(
                node=nodes[one.node], uid=one.uid, kind=one.kind, index=one.index, name=one.name,
                simulated=one.simulated, total_bytes=one.total_bytes, cores=list(one.cores),
                power_limit_w=one.power_limit_w,
            )
            for one in new
        )  # fmt: skip

    def _measure(
        self, devices: Mapping[UUID, Device], lines: Sequence[Reservation], workers: Mapping[UUID, Living],
        families: Mapping[int, tuple[int, ...]],
    ) -> dict[str, Measured]:  # fmt: skip
        occupants = []
        for line in lines:
            worker = workers.get(line.replica_id)
            pids = families.get(worker.pid, ()) if worker else ()
            busy = worker.busy if worker else None
            uid = devices[line.device_id].uid
            occupants.append(Occupant(str(line.replica_id), uid, pids, target(line, worker), busy))
        return {one.uid: one for source in self._sources for one in source.measure(occupants)}

    @staticmethod
    def _note_devices(
        devices: Mapping[UUID, Device], seen: Mapping[str, Measured], families: Mapping[int, tuple[int, ...]],
        now: datetime,
    ) -> None:  # fmt: skip
        ours = {pid for family in families.values() for pid in family}
        changed = []
        for device in devices.values():
            one = seen.get(device.uid)
            if one is not None and _shows(device, one, ours, now):
                changed.append(device)
        fields = ["used_bytes", "utilisation", "temperature", "power_w", "processes", "seen_at", "lost_at"]
        # An upsert of rows that are there, and locked: 0.2 s for a thousand, where bulk_update's CASE took seconds.
        Device.objects.bulk_create(
            changed, batch_size=1000, update_conflicts=True, update_fields=fields, unique_fields=["id"]
        )
        Node.objects.filter(id__in={device.node_id for device in changed}).update(seen_at=now)

    def _keep_minutes(self, devices: Iterable[Device], seen: Mapping[str, Measured], now: datetime) -> None:
        """Each device's minute grows in memory and is written when the next one begins."""
        minute = now.replace(second=0, microsecond=0)
        done = [row for row in self._minute.values() if row.minute < minute]
        if done:
            DeviceMinute.objects.bulk_create(done, ignore_conflicts=True)
            DeviceMinute.objects.filter(minute__lt=now - KEEP_MINUTES).delete()
            self._minute = {key: row for key, row in self._minute.items() if row.minute >= minute}
        for device in devices:
            one = seen.get(device.uid)
            if one is not None:
                row = self._minute.setdefault(device.id, DeviceMinute(device=device, minute=minute, looks=0))
                _add_look(row, one)

    # -- lines --------------------------------------------------------------------------------------------------------

    def _note_lines(
        self, devices: Mapping[UUID, Device], lines: Sequence[Reservation], seen: Mapping[str, Measured],
        workers: Mapping[UUID, Living],
    ) -> None:  # fmt: skip
        changed = []
        for line in lines:
            device = devices[line.device_id]
            one = seen.get(device.uid)
            if one is None:
                continue
            before = (line.measured_bytes, line.measured_peak_bytes, line.measured_parts)
            line.measured_bytes = one.held.get(str(line.replica_id), 0)
            line.measured_peak_bytes = max(line.measured_peak_bytes or 0, line.measured_bytes)
            worker = workers.get(line.replica_id)
            if worker is not None:
                known = {name: size for name, size in line.measured_parts.items() if name not in _OF_THE_MOMENT}
                line.measured_parts = {**known, **_told(worker)}
                self._learn(line, device, worker)
            if before != (line.measured_bytes, line.measured_peak_bytes, line.measured_parts):
                changed.append(line)
        fields = ["measured_bytes", "measured_peak_bytes", "measured_parts"]
        Reservation.objects.bulk_update(changed, fields, batch_size=1000)

    def _learn(self, line: Reservation, device: Device, worker: Living) -> None:
        """Once for each worker, when it is ready and has not worked yet: what it holds beside weights and KV."""
        key = (line.replica_id, worker.pid)
        held = line.measured_bytes or 0
        if device.simulated or not worker.ready or not worker.weights_bytes or key in self._taught or not held:
            return
        self._taught.add(key)
        overhead = held - worker.weights_bytes - kv_held(line.engine, device.kind, held, worker)
        if overhead > 0:
            line.measured_parts = {**line.measured_parts, "overhead": overhead}
            learn(line.engine, worker.runtime, device.kind, overhead)

    def _settle(
        self, devices: Mapping[UUID, Device], lines: list[Reservation], seen: Mapping[str, Measured],
        workers: Mapping[UUID, Living], families: Mapping[int, tuple[int, ...]], found: Look,
    ) -> None:  # fmt: skip
        """Close the lines of workers that are gone, once the driver shows their memory free; and no sooner."""
        now = self._clock()
        for line in list(lines):
            worker = workers.get(line.replica_id)
            if line.state != State.RELEASING or (worker is not None and worker.pid in families):
                self._gone.pop(line.id, None)
                continue
            device = devices[line.device_id]
            left = _left_behind(line, device, lines, seen.get(device.uid))
            since = self._gone.setdefault(line.id, now)
            if left and now - since < ORPHANED_AFTER_S:
                continue
            if left:
                text = _("{size} GiB that {who} left on {card} belong to nobody now.")
                text = text.format(size=gib(left), who=line.label, card=device)
                found.alarms.append(Alarm("orphan", device.uid, text, line.replica_id))
            release(line, text if left else "The driver shows its memory free")
            del self._gone[line.id]
            lines.remove(line)
            found.released.append(line.replica_id)

    @staticmethod
    def _warn(devices: Mapping[UUID, Device], lines: list[Reservation], found: Look) -> None:
        living = [device for device in devices.values() if device.lost_at is None]
        for card in queries.cards(living, lines, with_disks=False):
            found.alarms += _alarms(card)
        lent = Counter[UUID]()
        for line in lines:
            if line.lent_from_id is not None:
                lent[line.lent_from_id] += line.lent_bytes
        for line in lines:
            pool = line.measured_parts.get("kv") if line.lends else None
            if pool:
                found.pools[line.replica_id] = max(0.0, min(1.0, (line.pool_bytes - lent[line.id]) / pool))


def target(line: Reservation, worker: Living | None) -> int:
    """What a line is expected to hold once loaded: its reserve; of a pool that is lent from, what is in use."""
    if not line.lends or worker is None or worker.kv_usage is None:
        return line.reserved_bytes
    return line.reserved_bytes - int(line.pool_bytes * (1 - worker.kv_usage))


def kv_held(engine: str, kind: str, held: int, worker: Living) -> int:
    """KV bytes that are really there, when a worker is ready.

    On a card a pool is taken at start. On a CPU the embedded engine's takes memory block by block, as it is used; of
    another engine's what it holds tells whether it was touched.
    """
    used = int(worker.kv_bytes * (worker.kv_usage or 0.0))
    if kind == "gpu":
        return worker.kv_bytes
    if engine == "embedded" or held < worker.weights_bytes + worker.kv_bytes:
        return used
    return worker.kv_bytes


def learn(engine: str, runtime: str, kind: str, overhead: int) -> Overhead:
    """One more run's overhead; the mean follows the newest runs. An empty `runtime` is this version's own engine."""
    row, made = Overhead.objects.get_or_create(
        engine=engine,
        runtime=runtime or version(),
        device_kind=kind,
        defaults={"bytes": overhead, "highest_bytes": overhead},
    )
    if not made:
        row.runs += 1
        row.bytes += (overhead - row.bytes) // min(row.runs, RUNS)
        row.highest_bytes = max(row.highest_bytes, overhead)
        row.save()
    return row


def _update(row: Device, facts: DeviceFacts) -> None:
    """A device that is there; its row changes only where it is another one than before."""
    values = {
        "name": facts.name, "total_bytes": facts.total_bytes, "cores": list(facts.cores), "index": facts.index,
        "power_limit_w": facts.power_limit_w, "lost_at": None,
    }  # fmt: skip
    changed = [name for name, value in values.items() if getattr(row, name) != value]
    for name in changed:
        setattr(row, name, values[name])
    if changed:
        row.save(update_fields=changed)


def _shows(device: Device, one: Measured, ours: set[int], now: datetime) -> bool:
    """Note what a device shows; whether that is worth a write."""
    processes = [{"pid": use.pid, "bytes": use.bytes, "name": use.name, "ours": use.pid in ours} for use in one.foreign]
    new = (one.used_bytes, one.utilisation, one.temperature, one.power_w, processes)
    old = (device.used_bytes, device.utilisation, device.temperature, device.power_w, device.processes)
    device.used_bytes, device.utilisation, device.temperature, device.power_w, device.processes = new
    stale = device.seen_at is None or now - device.seen_at >= WRITE_EVERY
    if new != old or stale:
        device.seen_at = now
        return True
    return False


def _told(worker: Living) -> dict[str, int]:
    """What an engine says it holds."""
    told = {"weights": worker.weights_bytes, "kv": worker.kv_bytes}
    for name, share in (("kv_used", worker.kv_usage), ("kv_wanted", worker.kv_wanted)):
        if share is not None:
            told[name] = int(worker.kv_bytes * share)
    return {name: size for name, size in told.items() if size or name in _OF_THE_MOMENT}


def _left_behind(line: Reservation, device: Device, lines: Sequence[Reservation], one: Measured | None) -> int:
    """Bytes of a worker that is gone which its device still shows; a device that is lost shows none."""
    held = line.measured_bytes or 0
    if one is None:
        return 0 if device.lost_at is not None else held or 1
    known = sum(other.measured_bytes or 0 for other in lines if other.device_id == device.id)
    return left_behind(device.kind, device.total_bytes, held, one.used_bytes, known, line.unattributed_bytes or 0)


def _alarms(card: Card) -> list[Alarm]:
    found = []
    for press in pressed(card):
        text = _("{lender} uses {used} of the {left} GiB left to it on {card}: {borrower} has to give back its loan.")
        text = text.format(
            lender=press.lender_label, used=gib(press.used), left=gib(press.left), card=card.label,
            borrower=press.borrower_label,
        )  # fmt: skip
        found.append(Alarm("pressed", card.uid, text, UUID(press.borrower)))
    if card.free < 0:
        text = _("{card} holds {size} GiB more than it has, by the ledger: somebody grew beyond the plan.")
        found.append(Alarm("over", card.uid, text.format(card=card.label, size=gib(-card.free))))
    return found


def _add_look(row: DeviceMinute, one: Measured) -> None:
    if one.utilisation is not None:
        before = row.utilisation or 0.0
        row.utilisation = before + (one.utilisation - before) / (row.looks + 1)
    row.used_bytes = max(row.used_bytes or 0, one.used_bytes)
    row.looks += 1
