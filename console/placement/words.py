"""The planner's reasons as sentences, in the language that is active; in English where none is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from console.placement.planner import Reason


def gib(size: float) -> str:
    """Bytes as GiB, with as many digits as tell something: "72.0", "0.35"."""
    amount = size / (1 << 30)
    text = f"{amount:.1f}" if abs(amount) >= 10 or amount == 0 else f"{amount:.2f}"
    return text.replace("-", "−")


def say(reason: Reason) -> str:
    """The sentence of a reason."""
    return say_code(reason.code, reason.values)


def say_code(code: str, values: Mapping[str, Any]) -> str:
    """The sentence of a code and its figures, as a Decision keeps them; the code itself where it is unknown."""
    texts = {name: gib(value) for name, value in values.items() if name in _BYTES}
    maker = _SENTENCES.get(code)
    return code if maker is None else maker({**values, **texts})


def filter_name(code: str) -> str:
    """A filter's name in a narrow column."""
    names = {
        "lost": _("lost"), "cordoned": _("cordoned"), "bound": _("binding"), "kind": _("kind"), "class": _("class"),
        "group": _("neighbours"), "own": _("earlier worker"),
    }  # fmt: skip
    return names.get(code, code)


def part_name(part: str) -> str:
    """A part of a score."""
    names = {"space": _("room"), "disk": _("weights on disk"), "cool": _("cool"), "apart": _("apart")}
    return names.get(part, part)


def facts(reason: Reason) -> dict[str, Any]:
    """A reason as JSON keeps it."""
    return {"code": reason.code, "values": dict(reason.values), "text": say(reason)}


def _nowhere(v: Mapping[str, Any]) -> str:
    counts = v.get("counts", {})
    parts = [COUNTED[code](number) for code, number in sorted(counts.items(), key=lambda item: -item[1]) if number]
    text = _("No card takes it: {reasons}.").format(reasons="; ".join(parts)) if parts else _("No card takes it.")
    if "nearest" in v:
        text += " " + _("Nearest is {nearest}: {needed} GiB needed with the buffer, {free} free.").format(**v)
    return text


def _placed(v: Mapping[str, Any]) -> str:
    where = _("{card}").format(**v) if v["cards"] == 1 else _("{cards} cards, the fullest {card}").format(**v)
    return where + ": " + _("{needed} GiB with the buffer of {percent} %, {free} free.").format(**v)


def _mixed(v: Mapping[str, Any]) -> str:
    return _(
        "Beside another model ({models}) the buffer is 40 %: {needed} GiB are needed for a peak of {peak}, {free} are "
        "free, {missing} are missing."
    ).format(**v)


def _takes(v: Mapping[str, Any]) -> str:
    """With what would help: a share of the card for engines that take one, a smaller pool for the others."""
    if not v["share"]:
        text = _("Its engine takes {takes} GiB at start and {free} are free: a smaller KV pool would fit.")
        return text.format(**v)
    return _(
        "Its engine takes {takes} GiB at start and {free} are free; with gpu_memory_utilization {share} it would fit."
    ).format(**v)


COUNTED = {
    "lost": lambda n: ngettext("%d is lost", "%d are lost", n) % n,
    "cordoned": lambda n: ngettext("%d is cordoned", "%d are cordoned", n) % n,
    "bound": lambda n: ngettext("%d is not one it is bound to", "%d are not those it is bound to", n) % n,
    "kind": lambda n: ngettext("%d is of another kind", "%d are of another kind", n) % n,
    "class": lambda n: ngettext("%d serves another class", "%d serve another class", n) % n,
    "space": lambda n: ngettext("%d has too little free", "%d have too little free", n) % n,
    "mixed": lambda n: (
        ngettext(
            "%d holds another model and has too little for the buffer of 40 %%",
            "%d hold another model and have too little for the buffer of 40 %%",
            n,
        )
        % n
    ),
    "takes": lambda n: ngettext("%d has less than its engine takes", "%d have less than its engine takes", n) % n,
    "group": lambda n: (
        ngettext("%d has too few equal neighbours that fit", "%d have too few equal neighbours that fit", n) % n
    ),
    "own": lambda n: ngettext("%d still holds its earlier worker", "%d still hold its earlier worker", n) % n,
}
"""For each code, how many cards it stands against."""

_BYTES = frozenset(("peak", "needed", "free", "missing", "takes", "lent", "held"))

_SENTENCES: Mapping[str, Any] = {
    "placed": _placed,
    "borrowed": lambda v: _placed(v) + " " + _("{lent} GiB of it are lent by {lender}.").format(**v),
    "already": lambda v: _("It has its place already."),
    "nowhere": _nowhere,
    "no_cards": lambda v: _("No device is known yet: the controller looks every two seconds."),
    "lost": lambda v: _("The card has not been seen lately."),
    "cordoned": lambda v: _("Cordoned: it takes nobody new."),
    "bound": lambda v: _("The deployment is bound by hand to other cards."),
    "kind": lambda v: _("The engine {engine} does not run on a device of this kind ({kind}).").format(**v),
    "class": lambda v: _("One card serves one priority class: this one {theirs}, the replica is {ours}.").format(**v),
    "space": lambda v: _(
        "Too little is free: {needed} GiB are needed for a peak of {peak} with its buffer, {free} are free, {missing} "
        "are missing."
    ).format(**v),
    "mixed": _mixed,
    "takes": _takes,
    "group": lambda v: _("It fits, but the node has no {cards} equal cards that do.").format(**v),
    "own": lambda v: _("Its earlier worker still holds {held} GiB here.").format(**v),
}
