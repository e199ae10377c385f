"""What the cards page draws: three bars of a card's ledger on one scale, its last hour, and a refusal to scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from console.placement.ledger import Card, Resident
from console.placement.models import Device, DeviceMinute, Reservation
from console.placement.planner import BUFFER, MIXED_BUFFER
from console.placement.words import gib

BAND = (0.70, 0.85)
WIDTH, HEIGHT = 200.0, 40.0  # of the hour's drawing
_GAP = 0.12  # percent between two parts


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar: its class, and in percent of the card where it begins and how wide it is."""

    css: str
    x: float
    width: float
    title: str
    hatched: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One of the three lines of a card, in the order planned, reserved, measured."""

    name: str
    bytes: int
    label: str
    segments: tuple[Segment, ...]
    tick: float | None = None  # percent: where the planned peak ends


@dataclass(frozen=True, slots=True)
class Error:
    """An estimate against what was measured, in bytes; `share` of the measured."""

    name: str
    estimated: int
    measured: int

    @property
    def share(self) -> float:
        """Positive where too much was estimated."""
        return (self.estimated - self.measured) / self.measured


class _Stack:
    """Lays parts of a bar side by side."""

    def __init__(self, total: int) -> None:
        self.total, self.at, self.segments = total, 0.0, []  # type: int, float, list[Segment]

    def add(self, css: str, size: int, title: str, *, hatched: bool = False) -> None:
        if size <= 0:
            return
        width = 100 * size / self.total
        drawn = max(0.0, min(width, 100 - self.at) - (_GAP if width > 3 * _GAP else 0))
        self.segments.append(Segment(css, round(self.at, 3), round(drawn, 3), f"{title} {gib(size)} GiB", hatched))
        self.at += width


def bars(card: Card, lines: Mapping[str, Reservation]) -> list[Bar]:
    """Planned, reserved and measured of a card, on one scale. `lines` by replica."""
    planned, reserved, measured = _Stack(card.total), _Stack(card.total), _Stack(card.total)
    peak = sum(sum(line.planned.values()) for line in lines.values())
    for one in card.residents:
        line = lines[one.replica]
        _planned(planned, line)
        _reserved(reserved, one, line)
        _measured(measured, one, line)
    buffer = int(peak * (MIXED_BUFFER if len(card.models) > 1 else BUFFER))
    tick = round(planned.at, 3) if peak else None
    percent = 40 if len(card.models) > 1 else 20
    planned.add("m-buffer", buffer, _("buffer of {percent} %").format(percent=percent), hatched=True)
    measured.add("m-none", card.unattributed, pgettext("ledger", "unattributed"))
    held = sum(one.measured for one in card.residents)
    return [
        Bar("planned", peak + buffer, _label(pgettext("ledger", "planned"), peak + buffer), tuple(planned.segments)),
        Bar("reserved", _kept(card), _label(pgettext("ledger", "reserved"), _kept(card)), tuple(reserved.segments)),
        Bar("measured", held + card.unattributed, _label(pgettext("ledger", "measured"), held + card.unattributed),
            tuple(measured.segments), tick),
    ]  # fmt: skip


def _kept(card: Card) -> int:
    return sum(card.left(one) for one in card.residents)


def _label(name: str, size: int) -> str:
    return f"{name} {gib(size)} GiB"


def _rest(line: Reservation) -> int:
    """Activations and the runtime's overhead."""
    return int(line.planned.get("activations", 0) + line.planned.get("overhead", 0))


def _planned(stack: _Stack, line: Reservation) -> None:
    stack.add("m-weights", line.planned.get("weights", 0), _name(line, _("weights")))
    stack.add("m-act", _rest(line), _name(line, _("activations and runtime")))
    stack.add("m-kv", line.planned.get("kv", 0), _name(line, _("KV at the planned peak")))


def _reserved(stack: _Stack, one: Resident, line: Reservation) -> None:
    weights, rest = line.planned.get("weights", 0), _rest(line)
    pool = max(0, one.reserved - weights - rest)
    stack.add("m-weights", weights, _name(line, _("weights")))
    stack.add("m-act", rest, _name(line, _("activations and runtime")))
    stack.add("m-kvfree", pool, _name(line, _("KV pool")))


def _measured(stack: _Stack, one: Resident, line: Reservation) -> None:
    """Of what is measured the engine tells weights and KV in use; where it fills still, the weights come first."""
    weights = min(one.measured, line.measured_parts.get("weights") or line.planned.get("weights", 0))
    rest = min(one.measured - weights, _rest(line))
    pool = one.measured - weights - rest
    used = min(pool, line.measured_parts.get("kv_used", 0))
    stack.add("m-weights", weights, _name(line, _("weights")))
    stack.add("m-act", rest, _name(line, _("activations and runtime")))
    stack.add("m-kv", used, _name(line, _("KV in use")))
    stack.add("m-kvfree", pool - used, _name(line, _("KV held, not in use")))


def _name(line: Reservation, part: str) -> str:
    return f"{line.label}: {part}"


def errors(line: Reservation) -> list[Error]:
    """The estimates of one resident against what its engine and its device tell, where they told it."""
    told, planned = line.measured_parts, line.planned
    pool = line.reserved_bytes - planned.get("weights", 0) - _rest(line)
    found = []
    if told.get("weights") and planned.get("weights"):
        found.append(Error(_("weights"), planned["weights"], told["weights"]))
    if told.get("kv") and pool > 0:
        found.append(Error(_("KV pool"), pool, told["kv"]))
    if told.get("overhead") and planned.get("overhead"):
        found.append(Error(_("runtime"), planned["overhead"], told["overhead"]))
    # The embedded engine's pool fills as it is used: there only too much tells something.
    highest = line.measured_peak_bytes or 0
    if highest and (line.engine != "embedded" and not line.lends or highest > line.reserved_bytes):
        found.append(Error(_("highest in all"), line.reserved_bytes, highest))
    return found


@dataclass(frozen=True, slots=True)
class Hour:
    """Utilisation over the last hour as a path, with the band it should stay in."""

    path: str
    dot: tuple[float, float] | None
    band_y: float
    band_height: float


def hour(minutes: Sequence[DeviceMinute], device: Device, now: datetime) -> Hour:
    """The line ends at what is measured now; a gap in the looks is a gap in the line."""
    points = [(row.minute, row.utilisation) for row in minutes if row.utilisation is not None]
    if device.utilisation is not None and device.seen_at is not None:
        points.append((device.seen_at, device.utilisation))
    start = now - timedelta(hours=1)
    path, before = "", None
    where = None
    for at, load in sorted(points):
        if at < start:
            continue
        where = (round((at - start).total_seconds() / 3600 * WIDTH, 1), round(_y(load), 1))
        gap = before is None or at - before > timedelta(minutes=3)
        path += f"{'M' if gap else 'L'}{where[0]} {where[1]}"
        before = at
    return Hour(path, where, round(_y(BAND[1]), 1), round(_y(BAND[0]) - _y(BAND[1]), 1))


def _y(load: float) -> float:
    return HEIGHT - 2 - min(1.0, load) * (HEIGHT - 4)


@dataclass(frozen=True, slots=True)
class Squeeze:
    """A refused guest drawn on the card that came nearest: what is there, and how far it would stick out."""

    label: str
    segments: tuple[Segment, ...]
    edge: float  # percent of the drawing: where the card ends
    guest_x: float
    guest_width: float
    held: int
    needed: int
    total: int


def squeeze(candidate: Mapping[str, Any], need: Mapping[str, Any], total: int) -> Squeeze | None:
    """Draw a refusal from a decision's figures; None where the candidate had room, or was not weighed."""
    needed, free = int(candidate.get("needed_bytes") or 0), int(candidate.get("free_bytes") or 0)
    if not needed or not total or needed <= free:
        return None
    held = max(0, total - max(0, free))
    whole = held + needed
    stack = _Stack(whole)
    stack.add("m-kvfree", held, _("held"))
    parts = need.get("parts", {})
    start = stack.at
    for part in ("weights", "activations", "kv", "overhead"):
        stack.add("v-guest", int(parts.get(part, 0)), _part_names()[part])
    stack.add("m-buffer", needed - int(need.get("peak_bytes") or 0), _("buffer"), hatched=True)
    edge = 100 * total / whole
    return Squeeze(
        str(candidate.get("label", "")), tuple(stack.segments), round(edge, 2), round(start, 2),
        round(100 - start, 2), held, needed, total,
    )  # fmt: skip


def _part_names() -> dict[str, str]:
    return {
        "weights": _("weights"), "activations": _("activations"), "kv": _("KV at the planned peak"),
        "overhead": _("runtime"),
    }  # fmt: skip
