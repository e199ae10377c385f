"""Figures of the fleet's pages: bytes as GiB, coordinates of drawings, reasons of the planner as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import template
from django.utils.translation import gettext as _

from console.fleet import sweep
from console.placement import words
from console.placement.planner import Reason

register = template.Library()


@register.filter
def gib(size: int) -> str:
    """Bytes as GiB: "72.0", "0.35"."""
    return words.gib(size)


@register.filter
def kib(size: int) -> str:
    """Bytes as KiB."""
    return f"{size / 1024:,.4g}"


@register.filter
def plain(value: float | str | None) -> str:
    """A number as machines read it, whatever the language; a variable that is not there is the empty text."""
    return "" if value is None or isinstance(value, str) else f"{value:.10g}"


@register.filter
def parameters_plain(count: int) -> str:
    """ "135 M parameters", "7.6 B parameters"."""
    amount = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"
    return _("%(amount)s parameters") % {"amount": amount}


@register.filter
def signal_words(value: float, signal: str) -> str:
    """The value of an autoscaler's signal with its unit."""
    match signal:
        case "requests":
            return _("%(n)s a second and replica") % {"n": f"{value:.3g}"}
        case "queue_wait":
            return _("%(n)s s") % {"n": f"{value:.3g}"}
        case _:
            return f"{value:.0%}"


@register.filter
def reason_words(reason: Reason) -> str:
    """The sentence of a planner's reason."""
    return words.say(reason)


@register.filter
def sweep_words(stopped_by: Mapping[str, Any]) -> str:
    """Why a sweep went no further."""
    return sweep.words(stopped_by)
