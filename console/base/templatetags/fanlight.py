"""Figures, times, icons and small drawings of the templates. Numbers carry their unit in a span of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import wraps
from typing import Any

from django import template
from django.utils import formats, timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from console.telemetry.models import RequestRecord
from console.telemetry.trace import HATCHED, LAYERS, Share, first_token_us, layer_title, of_record

register = template.Library()
NONE = "–"

ICONS = {
    "overview": '<path d="M2 12.5a6 6 0 0 1 12 0Z"/><path d="M8 12.5V6.6M8 12.5 4 8.3M8 12.5l4-4.2"/>',
    "requests": '<path d="M2 4h5M4.5 8h6M8 12h6"/>',
    "models": '<path d="M8 1.8 14 5 8 8.2 2 5Z"/><path d="m2 8 6 3.2L14 8M2 11l6 3.2L14 11"/>',
    "deployments": '<path d="M8 10.5V2.5M4.8 5.4 8 2.3l3.2 3.1"/><path d="M2.5 10v2.6c0 .5.4.9.9.9h9.2c.5 0 .9-.4.9-.9V10"/>',  # noqa: E501
    "playground": '<path d="M2.2 3.4h7.3v6.2H5.4L3 11.6V9.6h-.8Z"/><path d="M11.5 6h2.3v6.2H13v1.6l-2.2-1.6H7.2"/>',
    "keys": '<circle cx="5" cy="10.6" r="2.9"/><path d="m7.2 8.4 5.6-5.6M10.4 5.2l2 2M12 3.6l1.6 1.6"/>',
    "tenants": '<circle cx="6" cy="5.4" r="2.4"/><path d="M1.8 13.4c.3-2.6 2-4 4.2-4s3.9 1.4 4.2 4M10.4 3.4a2.4 2.4 0 0 1 0 4.2M12 9.8c1.3.6 2 1.8 2.2 3.6"/>',  # noqa: E501
    "audit": '<rect x="2.5" y="2" width="11" height="12" rx="1.2"/><path d="m5 6 1 1 1.7-2M5 10.4l1 1 1.7-2M9.6 6.2h1.8M9.6 10.6h1.8"/>',  # noqa: E501
    "docs": '<path d="M8 4.2C6.6 3 4.6 2.7 2.4 2.8v9.6c2.2-.1 4.2.2 5.6 1.4 1.4-1.2 3.4-1.5 5.6-1.4V2.8C11.4 2.7 9.4 3 8 4.2Z"/><path d="M8 4.2v9.6"/>',  # noqa: E501
    "search": '<circle cx="7" cy="7" r="4.2"/><path d="m10.2 10.2 3.3 3.3"/>',
    "theme": '<circle cx="8" cy="8" r="5.6"/><path d="M8 2.4a5.6 5.6 0 0 1 0 11.2Z" fill="currentColor"/>',
    "menu": '<path d="M2 4.5h12M2 8h12M2 11.5h12"/>',
    "close": '<path d="m3.5 3.5 9 9M12.5 3.5l-9 9"/>',
    "older": '<path d="m6 3.5 4.5 4.5L6 12.5"/>',
    "newer": '<path d="M10 3.5 5.5 8l4.5 4.5"/>',
    "plus": '<path d="M8 3v10M3 8h10"/>',
    "copy": '<rect x="5.2" y="5.2" width="8.3" height="8.3" rx="1.2"/><path d="M10.8 5V3.4c0-.5-.4-.9-.9-.9H3.4c-.5 0-.9.4-.9.9v6.5c0 .5.4.9.9.9H5"/>',  # noqa: E501
    "download": '<path d="M8 3v8M4.8 8 8 11.2 11.2 8M3 13.5h10"/>',
    "sliders": '<path d="M2 4.5h7M12 4.5h2M2 11.5h2M7 11.5h7"/><circle cx="10.4" cy="4.5" r="1.6"/><circle cx="5.4" cy="11.5" r="1.6"/>',  # noqa: E501
    "stop": '<rect x="4" y="4" width="8" height="8" rx="1"/>',
    "cards": '<rect x="1.8" y="4" width="12.4" height="8" rx="1.2"/><circle cx="5.6" cy="8" r="1.8"/><circle cx="10.4" cy="8" r="1.8"/>',  # noqa: E501
    "routes": '<circle cx="3.2" cy="8" r="1.7"/><circle cx="12.8" cy="3.8" r="1.7"/><circle cx="12.8" cy="12.2" r="1.7"/><path d="M5 7.4c3 0 3-3.6 6-3.6M5 8.6c3 0 3 3.6 6 3.6"/>',  # noqa: E501
    "out": '<path d="M6.5 3H3.4c-.5 0-.9.4-.9.9v8.2c0 .5.4.9.9.9h3.1M10.5 5l3 3-3 3M13.2 8H6.5"/>',
    "columns": '<rect x="2" y="3" width="12" height="10" rx="1.2"/><path d="M8 3v10"/>',
}


@register.simple_tag
def icon(name: str) -> SafeString:
    """A 16-px line icon."""
    return format_html('<svg class="icon" viewBox="0 0 16 16" aria-hidden="true">{}</svg>', mark_safe(ICONS[name]))  # noqa: S308 ours


# ---------------------------------------------------------------------------------------------------------------
# Figures


def figure(show: Callable[..., str | SafeString]) -> Callable[..., str | SafeString]:
    """A filter of numbers: what is missing, None or a template's empty string, is a dash."""

    @wraps(show)
    def filtered(value: Any, *more: Any) -> str | SafeString:
        return NONE if value is None or value == "" else show(value, *more)

    return register.filter(show.__name__, filtered)


def _with_unit(figure: str, unit: str) -> SafeString:
    return format_html('{}<span class="u">{}</span>', figure, unit)


@figure
def num(value: float) -> str:
    """1234 → 1,234."""
    return f"{round(value):,}"


@figure
def dec(value: float, digits: int = 1) -> str:
    return f"{value:,.{digits}f}"


@figure
def rate(value: float) -> str:
    """A figure a second, with as many digits as it is worth."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 or value == 0 else f"{value:.2f}"


@figure
def ms(us: float) -> str | SafeString:
    """Microseconds as ms, or s from ten seconds on."""
    return _with_unit(*ms_parts(us))


@figure
def ms_plain(us: float) -> str:
    """The same as text, for titles and labels."""
    return " ".join(ms_parts(us))


def ms_parts(us: float) -> tuple[str, str]:
    if us >= 10_000_000:
        return f"{us / 1e6:,.2f}", "s"
    if us >= 100_000:
        return f"{us / 1e3:,.0f}", "ms"
    return (f"{us / 1e3:,.1f}" if us >= 10_000 else f"{us / 1e3:,.2f}"), "ms"


@figure
def ms_figure(us: float) -> str:
    """Milliseconds without the unit, for pairs that share one."""
    value = us / 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


@register.simple_tag
def ms_pair(low: float | None, high: float | None) -> SafeString:
    """Two times with one unit: ms, or s where the larger has ten of them."""
    in_seconds = high is not None and high >= 10_000_000

    def shown(us: float | None) -> str:
        if us is None:
            return NONE
        return f"{us / 1e6:,.2f}" if in_seconds else ms_figure(us)

    return format_html(
        '{}<span class="sep">/</span>{}<span class="u">{}</span>', shown(low), shown(high), "s" if in_seconds else "ms"
    )


@figure
def ms_exact(us: float) -> str | SafeString:
    """Milliseconds with two decimals, where sums must be checkable."""
    return _with_unit(f"{us / 1e3:,.2f}", "ms")


@figure
def secs(us: float) -> str | SafeString:
    """Microseconds as seconds with two decimals, ms under one second."""
    return _with_unit(f"{us / 1e6:,.2f}", "s") if us >= 1_000_000 else ms(us)


@figure
def secs_plain(us: float) -> str:
    return f"{us / 1e6:,.2f} s" if us >= 1_000_000 else ms_plain(us)


@figure
def pct(share: float, digits: int = 1) -> str | SafeString:
    """0.128 → 12.8 %."""
    return _with_unit(f"{share * 100:.{digits}f}", "%")


@figure
def pct_plain(share: float, digits: int = 1) -> str:
    return f"{share * 100:.{digits}f} %"


@register.filter
def share_of(part: float | str | None, whole: float | None) -> float | None:
    """A part of a whole, for `pct`."""
    return None if part is None or isinstance(part, str) or not whole else part / whole


@figure
def size(count: int) -> str | SafeString:
    """Bytes with a binary unit."""
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return _with_unit(f"{value:,.1f}" if unit != "B" else f"{value:.0f}", unit)


@figure
def big(count: int) -> str | SafeString:
    """134515008 → 134.5 M."""
    for limit, unit in ((1_000_000_000, "B"), (1_000_000, "M"), (10_000, "k")):
        if count >= limit:
            divisor = 1_000 if unit == "k" else limit
            return _with_unit(f"{count / divisor:,.1f}", unit)
    return f"{count:,}"


@figure
def money(amount: Decimal, currency: str) -> SafeString:
    """12.5 → 12.50 USD; small amounts with every digit they have."""
    whole = round(amount, 9).normalize()
    digits = max(2, -int(whole.as_tuple().exponent)) if abs(amount) < 1 else 2
    return _with_unit(f"{amount:,.{digits}f}", currency)


@figure
def exact(amount: Decimal) -> str:
    """An amount with every digit it has."""
    return f"{amount.normalize():,f}"


# ---------------------------------------------------------------------------------------------------------------
# Times, in the viewer's zone


@register.filter
def clock(moment: datetime | None) -> str:
    """14:32:07.412"""
    if moment is None:
        return NONE
    local = timezone.localtime(moment)
    return f"{local:%H:%M:%S}.{local.microsecond // 1000:03d}"


@register.filter
def moment(value: datetime | None) -> str:
    """29 Nov 2026 14:32, as the language writes it."""
    if value is None:
        return NONE
    return formats.date_format(timezone.localtime(value), _("j M Y H:i"), use_l10n=False)


@register.filter
def moment_s(value: datetime | None) -> str:
    """With seconds and milliseconds."""
    if value is None:
        return NONE
    local = timezone.localtime(value)
    day = formats.date_format(local, _("j M Y"), use_l10n=False)
    return f"{day} {local:%H:%M:%S}.{local.microsecond // 1000:03d}"


@register.filter
def list_time(value: datetime) -> str:
    """The time, with the day where it is not today."""
    local = timezone.localtime(value)
    if local.date() == timezone.localdate():
        return clock(value)
    day = formats.date_format(local, _("j M"), use_l10n=False)
    return f"{day} {local:%H:%M:%S}"


@register.filter
def ago(value: datetime | None, now: datetime | None = None) -> str | SafeString:
    """“12 s ago”, with the moment itself on hover."""
    if value is None:
        return NONE
    seconds = max(0, int(((now or timezone.now()) - value).total_seconds()))
    if seconds < 60:
        text = ngettext("%(n)s s ago", "%(n)s s ago", seconds) % {"n": seconds}
    elif seconds < 3600:
        text = ngettext("%(n)s min ago", "%(n)s min ago", seconds // 60) % {"n": seconds // 60}
    elif seconds < 2 * 86400:
        text = ngettext("%(n)s h ago", "%(n)s h ago", seconds // 3600) % {"n": seconds // 3600}
    else:
        text = ngettext("%(n)s d ago", "%(n)s d ago", seconds // 86400) % {"n": seconds // 86400}
    return format_html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), moment_s(value), text)


# ---------------------------------------------------------------------------------------------------------------
# Small drawings


@register.simple_tag
def swatch(layer: str) -> SafeString:
    """The little square of a legend."""
    hatch = mark_safe('<rect class="hatch" width="10" height="10"/>') if layer in HATCHED else ""
    return format_html(
        '<svg class="sw" aria-hidden="true"><rect class="l-{}" width="10" height="10"/>{}</svg>',
        layer,
        hatch,
    )


@register.simple_tag
def fill(css: str) -> SafeString:
    """The little square of a legend, by class."""
    return format_html(
        '<svg class="sw" aria-hidden="true"><rect class="{}" x=".5" y=".5" width="9" height="9"/></svg>',
        css,
    )


@register.simple_tag
def layer_legend(*leave_out: str) -> SafeString:
    """Swatches and names of the layers."""
    return format_html_join(
        "",
        "<span>{}{}</span>",
        ((swatch(layer), layer_title(layer)) for layer in LAYERS if layer not in leave_out),
    )


@register.simple_tag
def layer_bar(shares: Sequence[Share], scale: float = 1.0) -> SafeString:
    """A bar cut into layers; `scale` is its length against the full width."""
    parts, x = [], 0.0
    for share in shares:
        width = share.share * scale * 100
        if width >= 0.05:
            parts.append((f"{x:.2f}", f"{width:.2f}", share.layer, share.layer in HATCHED))
        x += width
    label = ", ".join(f"{share.title} {ms_plain(share.us)}" for share in shares)
    return format_html(
        '<svg class="mw" role="img" aria-label="{}"><title>{}</title>{}</svg>',
        label,
        label,
        format_html_join(
            "",
            '<rect class="l-{}" x="{}%" width="{}%" height="12"/>{}',
            (
                (
                    layer,
                    at,
                    width,
                    format_html('<rect class="hatch" x="{}%" width="{}%" height="12"/>', at, width) if hatched else "",
                )
                for at, width, layer, hatched in parts
            ),
        ),
    )


@register.simple_tag
def mini(row: RequestRecord, mode: str, longest_us: int) -> SafeString:
    """The small waterfall of a list row, to the scale of the longest."""
    shares = of_record(row, mode == "ttft")
    until = first_token_us(row) if mode == "ttft" else row.duration_us
    return layer_bar(shares, until / longest_us if longest_us else 0.0)


@register.simple_tag
def meter(share: float | None, label: str = "") -> SafeString:
    """A thin bar, amber from 85 % and red from 95 % on."""
    value = min(1.0, max(0.0, share or 0.0))
    css = "bad" if value >= 0.95 else "warn" if value >= 0.85 else ""
    return format_html(
        '<span class="meter"><svg role="img" aria-label="{} {}"><rect class="f {}" width="{}%" height="6"/></svg></span>',  # noqa: E501
        label,
        pct_plain(share, 0),
        css,
        f"{value * 100:.1f}",
    )


@register.simple_tag
def hbar(css: str, share: float) -> SafeString:
    """A bar of a small table."""
    hatch = (
        format_html('<rect class="hatch" width="{}%" height="8"/>', f"{share * 100:.1f}")
        if css.removeprefix("l-") in HATCHED
        else ""
    )
    return format_html(
        '<svg class="bar thin" aria-hidden="true"><rect class="{}" width="{}%" height="8" rx="1"/>{}</svg>',
        css,
        f"{share * 100:.1f}",
        hatch,
    )


@register.filter
def as_json(value: Any) -> str:
    """For a data attribute; Django escapes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@register.filter
def pretty(value: Any) -> str:
    """A value as it stands in JSON."""
    return json.dumps(value, ensure_ascii=False)


@register.filter
def get(mapping: Mapping[Any, Any], key: Any) -> Any:
    return mapping.get(key)


@register.filter
def outcome_css(outcome: str) -> str:
    """The class of a tag or status that shows an outcome."""
    return {"ok": "good", "cancelled": "", "rejected": "warn", "slow_reader": "warn"}.get(outcome, "bad")


@register.filter
def outcome_title(outcome: str) -> str:
    return {
        "ok": _("ok"),
        "cancelled": _("cancelled"),
        "error": _("error"),
        "timeout": _("timeout"),
        "rejected": _("rejected"),
        "slow_reader": _("slow reader"),
        "gateway_lost": _("gateway lost"),
    }.get(outcome, outcome)


@register.filter
def role_title(role: str) -> str:
    """The role of the target that a request went to."""
    known = {"stable": _("stable"), "canary": _("canary"), "shadow": _("shadow"), "fallback": _("fallback")}
    return known.get(role, role)


@register.filter
def state_css(state: str) -> str:
    """The class of a replica's, model's, key's or canary's state."""
    good = {"ready", "active", "registered", "passed"}
    busy = {"pending", "starting", "loading", "verifying", "draining", "fetching", "running"}
    if state in good:
        return "good"
    if state in busy:
        return "busy"
    return "bad" if state in {"failed", "hung", "refused", "failing", "rolled_back"} else "idle"


@register.filter
def state_title(state: str) -> str:
    return {
        "pending": _("pending"),
        "starting": _("starting"),
        "loading": _("loading"),
        "verifying": _("verifying"),
        "ready": _("ready"),
        "hung": _("hung"),
        "failed": _("failed"),
        "draining": _("draining"),
        "stopped": _("stopped"),
        "registered": _("registered"),
        "fetching": _("fetching"),
        "refused": _("refused"),
        "active": _("active"),
        "expired": _("expired"),
        "revoked": _("revoked"),
        "running": _("not decided yet"),
        "passed": _("passed"),
        "failing": _("worse than stable"),
        "rolled_back": _("rolled back"),
    }.get(state, state)


@register.filter
def verdict_title(verdict: str) -> str:
    """What routing said of a candidate; a state stands for itself."""
    known = {"chosen": _("chosen"), "not chosen": _("not chosen"), "just failed": _("just failed")}
    return known.get(verdict) or state_title(verdict)
