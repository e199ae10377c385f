"""Writes of placement: who gets which device, who gives it back, and which devices take nobody new.

The controller calls `place` and `releasing`; people call `cordon`. Each is one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils import timezone, translation

from console.audit.actions import Actor, record
from console.errors import NotAllowed, Refused
from console.placement import queries, words
from console.placement.ledger import Need
from console.placement.models import Decision, Device, Reservation
from console.placement.planner import Plan, Reason, Share, Verdict
from console.placement.planner import plan as planned

REPEAT_AFTER = timedelta(minutes=10)
"""A refusal that is the same as the replica's last one is written again only after this long."""
TOLD_CANDIDATES = 64
State = Reservation.State


@transaction.atomic
def place(need: Need, *, replica_id: UUID, deployment_id: UUID, label: str) -> Plan:
    """Find a place for a replica, keep its bytes in the ledger, and write the decision with every card's reason.

    Idempotent: a replica that has its place keeps it, whatever it needs now; give that back first (`releasing`). While
    an earlier worker of it still shows on a card, that card is refused. Where there is no place, `plan.placed` is False
    and `sentence(plan)` says why; the refusal is kept when it is another one than the last.
    """
    devices = list(
        Device.objects.select_for_update(of=("self",)).select_related("node").order_by("node__name", "index")
    )
    lines = queries.live_lines()
    by_id = {device.id: device for device in devices}
    if any(line.replica_id == replica_id and by_id[line.device_id].lost_at is not None for line in lines):
        releasing(replica_id, "A device of it is lost")
        lines = queries.live_lines()
    own = [line for line in lines if line.replica_id == replica_id]
    kept = [line for line in own if line.state == State.RESERVED]
    if kept:
        shares = tuple(_share_of(line, by_id[line.device_id]) for line in kept)
        return Plan(need, shares, Reason("already"))
    held = {by_id[line.device_id].uid: line.measured_bytes or line.reserved_bytes for line in own}
    cards = [card for card in queries.cards(devices, lines) if card.uid not in held]
    found = planned(need, cards, queries.policy())
    if held:
        found = _with_own(found, held, {device.uid: device for device in devices})
    _write(found, replica_id, deployment_id, label, {device.uid: device for device in devices}, lines)
    return found


def sentence(plan: Plan) -> str:
    """Why a plan is as it is, in English, for rows; pages say it in the reader's language from the code."""
    with translation.override("en"):
        return words.say(plan.reason)


def releasing(replica_id: UUID, reason: str) -> int:
    """A replica's worker was told to end, or is gone: its lines stay until the driver shows its memory free.

    Lines on lost devices are released at once. Returns how many lines it had. Idempotent.
    """
    with transaction.atomic():
        lines = list(
            Reservation.objects.select_for_update(of=("self",))
            .select_related("device")
            .filter(replica_id=replica_id, state=State.RESERVED)
        )
        for line in lines:
            line.releasing_at = timezone.now()
            line.unattributed_bytes = _unattributed(line.device)
            line.state, line.reason = State.RELEASING, reason
            line.save(update_fields=["state", "reason", "releasing_at", "unattributed_bytes"])
            if line.device.lost_at is not None:
                release(line, "Its device is lost")
    return len(lines)


def release(line: Reservation, reason: str) -> None:
    """The driver shows a line's memory free: nobody holds it any more, and what it lent or borrowed is settled."""
    line.state, line.reason, line.released_at = State.RELEASED, reason, timezone.now()
    line.lent_bytes = 0
    line.save(update_fields=["state", "reason", "released_at", "lent_bytes"])
    line.lent_to.exclude(state=State.RELEASED).update(lent_bytes=0)


@transaction.atomic
def cordon(actor: Actor, device: Device, cordoned: bool = True) -> Device:
    """Let a device take nobody new, or take replicas again; who lives there stays."""
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can cordon devices.")
    found = Device.objects.select_for_update(of=("self",)).get(pk=device.pk)
    if found.cordoned != cordoned:
        found.cordoned = cordoned
        found.save(update_fields=["cordoned"])
        record(actor, "device.cordon" if cordoned else "device.uncordon", found, None, cordoned=cordoned)
    return found


def device_named(name: str) -> Device:
    """A device by its uid, or by node and index ("gpu-a/3", "gpu-a/cpu"). Raises Refused."""
    if len(name) > 300 or not name.isprintable():
        raise Refused("A device is named by at most 300 printable characters.", "device")
    found = Device.objects.select_related("node").filter(uid=name).first()
    node, slash, index = name.rpartition("/")
    if found is None and slash:
        where = {"kind": Device.Kind.CPU} if index == "cpu" else {"kind": Device.Kind.GPU, "index": index}
        if index == "cpu" or index.isdecimal():
            found = Device.objects.select_related("node").filter(node__name=node, **where).first()
    if found is None:
        raise Refused(f"There is no device {name}: `manage.py cards list` shows them.", "device")
    return found


def told(plan: Plan) -> dict[str, Any]:
    """A plan as JSON: the API's answer, and what a Decision keeps of it."""
    return {
        "placed": plan.placed,
        "devices": list(plan.devices),
        "reason": words.facts(plan.reason),
        "score": plan.score,
        "need": need_facts(plan.need),
        "candidates": [verdict_facts(verdict) for verdict in plan.verdicts[:TOLD_CANDIDATES]],
        "not_shown": max(0, len(plan.verdicts) - TOLD_CANDIDATES),
    }


def need_facts(need: Need) -> dict[str, Any]:
    """What was asked for, in bytes."""
    return {
        "model": need.model,
        "engine": need.engine,
        "priority_class": need.priority_class,
        "peak_bytes": need.peak.total,
        "parts": need.peak.parts(),
        "takes_bytes": need.takes,
        "takes_share": need.takes_share,
        "cards": need.cards,
        "binding": list(need.binding),
        "spread": need.spread,
        "borrows": need.borrows,
    }


def verdict_facts(verdict: Verdict) -> dict[str, Any]:
    """One card's verdict; `reasons` are all that speaks against it."""
    return {
        "device": verdict.uid,
        "node": verdict.node,
        "label": verdict.label,
        "simulated": verdict.simulated,
        "fits": verdict.fits,
        "chosen": verdict.chosen,
        "needed_bytes": verdict.needed,
        "free_bytes": verdict.free,
        "buffer": verdict.buffer,
        "score": verdict.score,
        "parts": dict(verdict.parts),
        "lent_bytes": verdict.lent,
        "reasons": [words.facts(reason) for reason in verdict.reasons],
    }


def _write(
    plan: Plan, replica_id: UUID, deployment_id: UUID, label: str, devices: Mapping[str, Device],
    lines: list[Reservation],
) -> None:  # fmt: skip
    for share in plan.shares:
        _reserve(plan.need, share, replica_id, deployment_id, label, devices[share.uid], lines)
    with translation.override("en"):
        facts, reason = told(plan), words.say(plan.reason)
    if not plan.placed and _said_already(replica_id, reason):
        return
    Decision.objects.create(
        replica_id=replica_id,
        deployment_id=deployment_id,
        label=label,
        placed=plan.placed,
        devices=list(plan.devices),
        reason=reason,
        candidates=facts["candidates"],
        need=facts["need"] | {"reason": facts["reason"], "not_shown": facts["not_shown"]},
    )


def _reserve(
    need: Need, share: Share, replica_id: UUID, deployment_id: UUID, label: str, device: Device,
    lines: list[Reservation],
) -> None:  # fmt: skip
    here = [line for line in lines if line.device_id == device.id]
    lender = next((line for line in here if str(line.replica_id) == share.lender), None)
    Reservation.objects.create(
        device=device,
        replica_id=replica_id,
        deployment_id=deployment_id,
        label=label,
        model=need.model,
        engine=need.engine,
        priority_class=need.priority_class,
        planned=need.peak.parts(),
        reserved_bytes=share.reserved,
        cores=list(share.cores),
        exclusive_cores=share.exclusive,
        lent_from=lender,
        lent_bytes=share.lent if lender else 0,
        lends=need.lends,
        floor_bytes=need.floor if need.lends else 0,
        reason=f"Placed on {device.node.name}",
    )
    for line in here:  # at its next start it waits passively too
        if line.exclusive_cores and set(line.cores) & set(share.cores):
            line.exclusive_cores = False
            line.save(update_fields=["exclusive_cores"])


def _share_of(line: Reservation, device: Device) -> Share:
    return Share(
        device.uid, line.reserved_bytes, lent=line.lent_bytes, cores=tuple(line.cores), exclusive=line.exclusive_cores
    )


def _with_own(plan: Plan, held: Mapping[str, int], devices: Mapping[str, Device]) -> Plan:
    """The same plan, with the cards that an earlier worker of the replica still holds among the refused."""
    more = tuple(
        Verdict(uid, devices[uid].node.name, str(devices[uid]), devices[uid].simulated, 0, 0, 0.0,
                (Reason("own", {"held": size}),))
        for uid, size in held.items()
    )  # fmt: skip
    verdicts = (*plan.verdicts, *more)
    if plan.placed:
        return Plan(plan.need, plan.shares, plan.reason, verdicts, plan.score)
    if not plan.verdicts and len(more) == 1:
        return Plan(plan.need, (), more[0].reasons[0], verdicts)
    counts = {**plan.reason.values.get("counts", {}), "own": len(more)}
    return Plan(plan.need, (), Reason("nowhere", {**plan.reason.values, "counts": counts}), verdicts)


def _said_already(replica_id: UUID, reason: str) -> bool:
    last = Decision.objects.filter(replica_id=replica_id).first()
    return last is not None and last.reason == reason and last.at > timezone.now() - REPEAT_AFTER


def _unattributed(device: Device) -> int:
    """Bytes that the driver showed beyond those of its residents."""
    lines = Reservation.objects.filter(device=device, state__in=queries.LIVE)
    known = sum(line.measured_bytes or 0 for line in lines)
    return max(0, (device.used_bytes or 0) - known)
