"""Nodes and cards, for admins: who lives where, what is free, what was refused; and what would happen if."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from console.base.views import actor_of
from console.catalog.models import Model, Runtime
from console.errors import ConsoleError
from console.fleet.models import Replica
from console.placement import queries, words
from console.placement.actions import cordon, device_named
from console.placement.drawing import BAND, Bar, Error, Hour, Squeeze, bars, errors, hour, squeeze
from console.placement.ledger import Card, pressed
from console.placement.models import Decision, Device, DeviceMinute, Reservation
from console.placement.whatif import CLASSES, Answer, ask
from engine.adapters import ADAPTERS

NOBODYS = 512 << 20
"""Bytes that belong to nobody, from which on a card says so."""
REFUSALS = 3
_FITS = ("space", "mixed", "takes")  # reasons of the fit; all others are filters


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """A replica on a card, with its state, its loans, and how good its estimate was."""

    line: Reservation
    replica: Replica | None
    errors: list[Error]
    lent_out: int
    lender: str


@dataclass(frozen=True, slots=True)
class CardRow:
    """One card as the page shows it."""

    device: Device
    card: Card
    bars: list[Bar]
    hour: Hour
    residents: list[ResidentRow]
    priority_class: str
    notes: list[str]

    @property
    def load(self) -> str:
        """Below, in or above the band, in a class."""
        load = self.device.utilisation
        return "" if load is None else "warn-t" if load > BAND[1] else ""

    @property
    def short(self) -> str:
        """Its name within its node."""
        return "CPU" if self.device.kind == Device.Kind.CPU else str(self.device.index)

    @property
    def nobodys(self) -> bool:
        """Whether bytes that belong to nobody are worth a word: on a card, where they do not belong."""
        return self.device.kind == Device.Kind.GPU and self.card.unattributed >= NOBODYS + self.card.total // 100


@dataclass(frozen=True, slots=True)
class Refusal:
    """A placement that was refused, with its reasons in the reader's language, drawn where that tells something."""

    decision: Decision
    sentence: str
    reasons: list[str]
    squeeze: Squeeze | None


@require_GET
def cards(request: HttpRequest) -> HttpResponse:
    """Every card with its ledger, by node."""
    _admins_only(request)
    rows = _rows()
    by_node: dict[str, list[CardRow]] = {}
    for row in rows:
        by_node.setdefault(row.device.node.name, []).append(row)
    context = {
        "nodes": [(group[0].device.node, group, _summary(group)) for group in by_node.values()],
        "figures": _figures(rows),
        "refusals": _refusals({row.device.uid: row.card.total for row in rows}),
        "simulated": any(row.device.simulated for row in rows),
    }
    template = "placement/_cards.html" if request.headers.get("HX-Request") else "placement/cards.html"
    return render(request, template, context)


@require_POST
def set_cordon(request: HttpRequest) -> HttpResponse:
    """Take a card out of placement, or back."""
    _admins_only(request)
    try:
        device = cordon(actor_of(request), device_named(request.POST.get("device", "")), "on" in request.POST)
    except ConsoleError as error:
        messages.error(request, str(error))
    else:
        said = _("{card} takes nobody new.") if device.cordoned else _("{card} takes replicas again.")
        messages.success(request, said.format(card=device))
    return redirect("cards")


@require_GET
def what_if(request: HttpRequest) -> HttpResponse:
    """Where a replica would go, and of every card why not; starts nothing."""
    _admins_only(request)
    answer, error = None, ""
    if request.GET.get("model"):
        try:
            answer = ask(_given(request.GET))
        except ConsoleError as refused:
            error = str(refused)
    context = {
        "models": Model.objects.exclude(layers=None).exclude(parameters=None),
        "runtimes": Runtime.objects.filter(state=Runtime.State.READY),
        "engines": list(ADAPTERS),
        "classes": CLASSES,
        "quantisations": sorted({word for each in ADAPTERS.values() for word in each.capabilities.quantisations}),
        "asked": request.GET,
        "error": error,
        **(_answered(answer) if answer else {}),
    }
    return render(request, "placement/what_if.html", context)


def _answered(answer: Answer) -> dict[str, Any]:
    plan = answer.plan
    verdicts = [
        {
            "verdict": verdict,
            "why": [words.say(reason) for reason in verdict.reasons],
            "filter": [words.filter_name(reason.code) for reason in verdict.reasons if reason.code not in _FITS],
            "parts": [(words.part_name(name), value) for name, value in verdict.parts.items()],
        }
        for verdict in plan.verdicts[:100]
    ]
    return {
        "answer": answer,
        "sentence": words.say(plan.reason),
        "verdicts": verdicts,
        "left_out": max(0, len(plan.verdicts) - len(verdicts)),
        "empty": int(answer.sizing.peak.total * 1.2),
        "mixed": int(answer.sizing.peak.total * 1.4),
    }


def _given(asked: Mapping[str, str]) -> dict[str, Any]:
    names = ("model", "engine", "runtime", "quantisation", "planned_concurrency", "planned_tokens", "priority_class",
             "tensor_parallel", "spread")  # fmt: skip
    return {name: asked[name] for name in names if asked.get(name)}


# -- rows of the cards page ----------------------------------------------------------------------------------------


def _rows() -> list[CardRow]:
    """Devices that are there, or were until lately, or that somebody still lives on."""
    now = timezone.now()
    devices = list(Device.objects.select_related("node").order_by("node__name", "kind", "index"))
    lines = queries.live_lines()
    lived_on = {line.device_id for line in lines}
    devices = [d for d in devices if not d.lost_at or d.id in lived_on or now - d.lost_at < timedelta(hours=1)]
    replicas = {r.id: r for r in Replica.objects.filter(id__in={line.replica_id for line in lines})}
    minutes: dict[UUID, list[DeviceMinute]] = {}
    for row in DeviceMinute.objects.filter(minute__gte=now - timedelta(hours=1)):
        minutes.setdefault(row.device_id, []).append(row)
    here: dict[UUID, list[Reservation]] = {}
    for line in lines:
        here.setdefault(line.device_id, []).append(line)
    found = []
    for device, card in zip(devices, queries.cards(devices, lines), strict=True):
        mine = {str(line.replica_id): line for line in here.get(device.id, [])}
        found.append(
            CardRow(
                device,
                card,
                bars(card, mine),
                hour(minutes.get(device.id, []), device, now),
                [_resident(card, line, replicas.get(line.replica_id)) for line in mine.values()],
                ", ".join(sorted(card.classes)),
                _notes(card),
            )
        )
    return found


def _resident(card: Card, line: Reservation, replica: Replica | None) -> ResidentRow:
    one = card.resident(str(line.replica_id))
    lender = card.resident(one.lender) if one is not None and one.lender else None
    lent_out = card.lent_out.get(str(line.replica_id), 0)
    return ResidentRow(line, replica, errors(line), lent_out, lender.label if lender else "")


def _notes(card: Card) -> list[str]:
    found = []
    for press in pressed(card):
        text = _("{lender} uses {used} of the {left} GiB left to it: {borrower} has to give back its loan.")
        found.append(
            text.format(lender=press.lender_label, borrower=press.borrower_label, used=words.gib(press.used),
                        left=words.gib(press.left))
        )  # fmt: skip
    if card.free < 0:
        text = _("The ledger holds {size} GiB more than the card has: somebody grew beyond the plan. It admits nobody.")
        found.append(text.format(size=words.gib(-card.free)))
    return found


def _summary(group: list[CardRow]) -> str:
    """ "8 × A100-80G, 80.0 GiB each"."""
    counts: dict[tuple[str, int], int] = {}
    for row in group:
        key = (row.device.name, row.card.total)
        counts[key] = counts.get(key, 0) + 1
    each = _("{count} × {name}, {size} GiB each")
    one = _("{name}, {size} GiB")
    return "; ".join(
        (each if count > 1 else one).format(count=count, name=name, size=words.gib(size))
        for (name, size), count in counts.items()
    )


def _figures(rows: list[CardRow]) -> dict[str, Any]:
    loads = [row.device.utilisation for row in rows if row.device.utilisation is not None]
    heats = [row for row in rows if row.device.temperature is not None]
    hottest = max(heats, key=lambda row: row.device.temperature or 0, default=None)
    peaks = sum(sum(one.line.planned.values()) for row in rows for one in row.residents)
    return {
        "cards": len(rows),
        "in_use": sum(1 for row in rows if row.residents),
        "total": sum(row.card.total for row in rows),
        "used": sum(row.card.used for row in rows),
        "reserved": sum(one.line.reserved_bytes for row in rows for one in row.residents),
        "peaks": peaks,
        "lent": sum(sum(row.card.lent_out.values()) for row in rows),
        "free": sum(max(0, row.card.free) for row in rows if not row.device.lost_at and not row.device.cordoned),
        "unattributed": sum(row.card.unattributed for row in rows),
        "busy": sum(loads) / len(loads) if loads else None,
        "in_band": sum(1 for load in loads if BAND[0] <= load <= BAND[1]),
        "power": _sum(row.device.power_w for row in rows),
        "power_limit": _sum(row.device.power_limit_w for row in rows),
        "hottest": hottest,
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _refusals(totals: Mapping[str, int]) -> list[Refusal]:
    """The newest refusals of the last day that nothing has answered since: one for each replica."""
    since = timezone.now() - timedelta(hours=24)
    oldest = UUID(int=int(since.timestamp() * 1000) << 80)  # ids begin with their millisecond
    latest: dict[Any, Decision] = {}
    for decision in Decision.objects.filter(id__gte=oldest).defer("candidates", "need")[:500]:
        latest.setdefault(decision.replica_id or decision.id, decision)
    refused = [decision for decision in latest.values() if not decision.placed]
    return [_refusal(decision, totals) for decision in refused[:REFUSALS]]


def _refusal(decision: Decision, totals: Mapping[str, int]) -> Refusal:
    reason = decision.need.get("reason", {})
    weighed = [c for c in decision.candidates if c.get("needed_bytes", 0) > c.get("free_bytes", 0)]
    nearest = min(weighed, key=lambda c: c["needed_bytes"] - c["free_bytes"], default=None)
    shown = nearest or next(iter(decision.candidates), None)
    said = [words.say_code(r["code"], r["values"]) for r in (shown or {}).get("reasons", [])]
    drawn = squeeze(nearest, decision.need, totals.get(nearest["device"], 0)) if nearest else None
    sentence = words.say_code(reason["code"], reason["values"]) if reason else decision.reason
    return Refusal(decision, sentence, said, drawn)


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
