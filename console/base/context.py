"""What every page shows around its content: navigation, version, theme, zone, words for the scripts."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext as _

from console.base.middleware import ZONE_COOKIE
from console.tenants.queries import visible_tenants
from console.version import version


def console(request: HttpRequest) -> dict[str, Any]:
    """The template context of console.base."""
    user = getattr(request, "user", None)
    signed_in = bool(user and user.is_authenticated)
    return {
        "version": version(),
        "theme": user.theme if signed_in and user else "",
        "zone": timezone.get_current_timezone_name(),
        "zone_cookie": "" if signed_in and user and user.time_zone else ZONE_COOKIE,
        "nav": _navigation(request, bool(user and user.is_staff)) if signed_in else [],
        "tenants": SimpleLazyObject(lambda: list(visible_tenants(user)) if user else []),
        "initials": _initials(user.get_full_name() or user.get_username()) if signed_in and user else "",
        "languages": [("en", "English"), ("zh-hans", "中文")],
        "ranges": [
            ("15m", _("15 m")),
            ("1h", _("1 h")),
            ("6h", _("6 h")),
            ("24h", _("24 h")),
            ("7d", _("7 d")),
        ],
        "public_url": settings.PUBLIC_URL,
        "words": _words(),
    }


def _navigation(request: HttpRequest, is_admin: bool) -> list[dict[str, Any]]:
    """Groups of links to the pages that exist and that this person may open."""
    groups: list[tuple[str, list[tuple[str, str]]]] = [
        (
            _("Observe"),
            [
                ("overview", _("Overview")),
                ("requests", _("Requests")),
                *([("cards", _("Cards"))] if is_admin else []),
            ],
        ),
        (
            _("Serve"),
            [
                ("models", _("Models")),
                *([("deployments", _("Deployments")), ("routes", _("Routes"))] if is_admin else []),
                ("playground", _("Playground")),
            ],
        ),
        (_("Access"), [("keys", _("Keys")), *([("tenants", _("Tenants"))] if is_admin else [])]),
        (_("Operate"), [("audit", _("Audit log")), ("docs", _("Docs"))]),
    ]
    here = request.resolver_match.url_name if request.resolver_match else ""
    section = (here or "").split("-")[0]
    current = {
        "request": "requests",
        "deployment": "deployments",
        "route": "routes",
        "tenant": "tenants",
        "key": "keys",
    }.get(section, section)
    return [
        {
            "title": title,
            "links": [
                {"name": name, "title": text, "url": reverse(name), "current": name == current} for name, text in links
            ],
        }
        for title, links in groups
    ]


def _initials(name: str) -> str:
    parts = name.replace(".", " ").replace("-", " ").split()
    return "".join(part[0] for part in parts[:2]).upper() or "?"


def _words() -> dict[str, str]:
    """Texts that the scripts put on the page."""
    return {
        "copied": _("Copied"),
        "copyFailed": _("Copying was refused by the browser"),
        "live": _("Live"),
        "reconnecting": _("Reconnecting"),
        "polling": _("Polling"),
        "idle": _("idle"),
        "waiting": _("waiting"),
        "queued": _("waiting, place {place} of {of}"),
        "starting": _("the model is being started, about {seconds} s more"),
        "streaming": _("streaming"),
        "stopped": _("stopped"),
        "failed": _("failed"),
        "you": _("You"),
        "disconnected": _("The connection to Fanlight was lost. What had arrived is kept; sending again reconnects."),
        "noAnswer": _("The model ended without a word."),
        "stop": _("Stop"),
        "send": _("Send"),
        "token": _("token"),
        "block": _("block"),
        "cached": _("cached"),
        "computed": _("computed"),
        "generated": _("generated"),
        "contextOf": _("{n} tokens of context"),
        "gapTip": _("token {n}: {ms} ms after the one before"),
        "blockTip": _("block {n} of {total}, {kind}, tokens {from}–{to}"),
        "requests": _("{n} requests"),
        "latencyTip": _("{time}  p99 {p99} ms, p50 {p50} ms"),
        "trafficTip": _("{time}  ok {ok}, cancelled {cancelled}, rejected {rejected}, error {failed}"),
        "histTip": _("{from} – {to}: {n} requests"),
        "noData": _("Nothing was measured in this time."),
        "loadFailed": _("This part could not be loaded. Reload the page, or try a shorter time range."),
    }
