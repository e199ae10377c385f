"""Reads of placement: rows as the planner's cards, and what pages and the API show of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.conf import settings

from console.placement.ledger import Card, Resident
from console.placement.models import Device, Overhead, Reservation
from console.placement.planner import Policy
from console.version import version

LIVE = (Reservation.State.RESERVED, Reservation.State.RELEASING)


def policy() -> Policy:
    """How this installation reads the buffer."""
    return Policy(settings.ENV["PLACEMENT_BUFFER"])


def cards(
    devices: Iterable[Device] | None = None, lines: Iterable[Reservation] | None = None, *, with_disks: bool = True
) -> list[Card]:
    """All devices as the planner sees them now, in the order of nodes; at most three queries."""
    if devices is None:
        devices = Device.objects.select_related("node")
    if lines is None:
        lines = live_lines()
    by_device: dict[UUID, list[Reservation]] = {}
    for line in lines:
        by_device.setdefault(line.device_id, []).append(line)
    names = {line.id: str(line.replica_id) for group in by_device.values() for line in group}
    on_disk = models_by_node() if with_disks else {}
    return [
        card_of(device, by_device.get(device.id, []), names, on_disk.get(device.node_id, frozenset()))
        for device in devices
    ]


def live_lines() -> list[Reservation]:
    """Every line of the ledger that holds bytes, oldest first."""
    return list(Reservation.objects.filter(state__in=LIVE).order_by("created_at"))


def card_of(device: Device, lines: list[Reservation], names: dict[UUID, str], on_disk: frozenset[str]) -> Card:
    """One device with its lines; `names` are replicas by the id of their line, for lenders."""
    return Card(
        uid=device.uid,
        node=device.node.name,
        kind=device.kind,
        name=device.name,
        total=device.total_bytes,
        used=device.used_bytes or 0,
        index=device.index,
        temperature=device.temperature,
        cores=tuple(device.cores),
        cordoned=device.cordoned,
        lost=device.lost_at is not None,
        simulated=device.simulated,
        on_disk=on_disk,
        residents=tuple(resident_of(line, names) for line in lines),
    )


def resident_of(line: Reservation, names: dict[UUID, str]) -> Resident:
    """A line as the ledger reckons with it. A loan whose lender has gone is nobody's any more."""
    lender = names.get(line.lent_from_id, "") if line.lent_from_id else ""
    return Resident(
        replica=str(line.replica_id),
        label=line.label,
        model=line.model,
        reserved=line.reserved_bytes,
        engine=line.engine,
        deployment=str(line.deployment_id),
        priority_class=line.priority_class,
        measured=line.measured_bytes or 0,
        in_use=_in_use(line),
        lends=line.lends,
        floor=line.floor_bytes,
        lender=lender,
        lent=line.lent_bytes if lender else 0,
        releasing=line.state == Reservation.State.RELEASING,
        cores=tuple(line.cores),
        exclusive=line.exclusive_cores,
        since=line.created_at.timestamp(),
    )


def _in_use(line: Reservation) -> int | None:
    """What a lender cannot do without: all but its pool, and what requests hold or wait for. None: it does not tell."""
    wanted = line.measured_parts.get("kv_wanted") if line.lends else None
    return None if wanted is None else line.besides_pool_bytes + int(wanted)


def models_by_node() -> dict[UUID, frozenset[str]]:
    """Names of models whose weights have been on a node's disk, because a replica of them ran there."""
    found: dict[UUID, set[str]] = {}
    for node, model in Reservation.objects.values_list("device__node_id", "model").distinct().order_by():
        found.setdefault(node, set()).add(model)
    return {node: frozenset(names) for node, names in found.items()}


def learnt_overhead(engine: str, runtime: str, kind: str) -> int | None:
    """Bytes that earlier runs took beside weights and KV; None where none has been seen.

    An empty `runtime` is the embedded engine of this version.
    """
    row: Any = Overhead.objects.filter(engine=engine, runtime=runtime or version(), device_kind=kind).first()
    return None if row is None else int(row.bytes)
