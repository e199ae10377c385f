"""Devices and placement over JSON, for platform admins."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from console.base.api import Reply, body_of
from console.placement import queries
from console.placement.ledger import Card, Resident
from console.placement.models import Device, Reservation
from console.placement.whatif import ask


def devices(request: HttpRequest) -> Reply:
    """Every device with its ledger: what it is, what it shows, who lives there and what is free. Bytes."""
    _admins_only(request)
    return {"data": all_facts()}


def plan(request: HttpRequest) -> Reply:
    """Where a replica would go, and of every card why not. Starts nothing and keeps nothing."""
    _admins_only(request)
    return ask(body_of(request)).facts()


def all_facts() -> list[dict[str, Any]]:
    """All devices, as JSON tells them."""
    rows = list(Device.objects.select_related("node").order_by("node__name", "kind", "index"))
    lines = queries.live_lines()
    cards = queries.cards(rows, lines)
    kept = {(line.device_id, str(line.replica_id)): line for line in lines}
    return [device_facts(row, card, kept) for row, card in zip(rows, cards, strict=True)]


def device_facts(row: Device, card: Card, lines: dict[tuple[Any, str], Reservation]) -> dict[str, Any]:
    """One device."""
    return {
        "uid": row.uid,
        "node": row.node.name,
        "kind": row.kind,
        "index": row.index,
        "name": row.name,
        "simulated": row.simulated,
        "cordoned": row.cordoned,
        "lost_at": row.lost_at.isoformat() if row.lost_at else None,
        "seen_at": row.seen_at.isoformat() if row.seen_at else None,
        "total_bytes": card.total,
        "used_bytes": row.used_bytes,
        "claimed_bytes": card.claimed,
        "unattributed_bytes": card.unattributed,
        "free_bytes": card.free,
        "priority_class": next(iter(sorted(card.classes)), None),
        "cores": list(card.cores),
        "utilisation": row.utilisation,
        "temperature": row.temperature,
        "power_w": row.power_w,
        "power_limit_w": row.power_limit_w,
        "processes": row.processes,
        "residents": [_resident(card, one, lines[row.id, one.replica]) for one in card.residents],
    }


def _resident(card: Card, one: Resident, line: Reservation) -> dict[str, Any]:
    return {
        "replica": one.replica,
        "label": one.label,
        "model": one.model,
        "engine": one.engine,
        "state": line.state,
        "reason": line.reason,
        "planned": line.planned,
        "reserved_bytes": one.reserved,
        "measured_bytes": line.measured_bytes,
        "measured_peak_bytes": line.measured_peak_bytes,
        "measured_parts": line.measured_parts,
        "held_bytes": card.held(one),
        "lends": one.lends,
        "lent_out_bytes": card.lent_out.get(one.replica, 0),
        "lender": one.lender or None,
        "lent_bytes": one.lent,
        "cores": list(one.cores),
        "exclusive_cores": one.exclusive,
        "since": line.created_at.isoformat(),
    }


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
