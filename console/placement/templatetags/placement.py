"""Bytes and shares as the cards page writes them."""

from __future__ import annotations

from django import template

from console.placement import words

register = template.Library()


@register.filter
def gib(size: float | str | None) -> str:
    """Bytes as GiB, without the unit."""
    return words.gib(size) if isinstance(size, int | float) else "–"


@register.filter
def percent(share: float | str | None) -> str:
    """0.583 as 58."""
    return f"{100 * share:.0f}" if isinstance(share, int | float) else "–"


@register.filter
def off(share: float) -> str:
    """An error with its sign, in percent: +0.4, −12."""
    value = 100 * share
    text = f"{abs(value):.1f}" if abs(value) < 10 else f"{abs(value):.0f}"
    return "0.0" if text == "0.0" else ("+" if value > 0 else "−") + text


@register.filter
def kib(size: float) -> str:
    """Bytes as KiB, without the unit."""
    amount = size / 1024
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.1f}"


@register.filter
def unlocalized(value: float) -> str:
    """A number as attributes of SVG want it, whatever the language."""
    return f"{value:g}"
