"""The overview."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.base.views import too_slow
from console.dashboards import overview as live
from console.telemetry import queries, windows
from console.telemetry.scope import scope_of


@require_GET
def overview(request: HttpRequest) -> HttpResponse:
    """Is it healthy now; the socket keeps the same parts fresh."""
    key = request.GET.get("range", "")
    key = key if key in windows.RANGES else windows.DEFAULT
    try:
        snapshot = live.newest(scope_of(request.user), key)
    except queries.TooSlow:
        return too_slow(request)
    context = {
        "s": snapshot,
        "window": snapshot.window,
        "custom_range": False,
        "verdict": live.verdict(snapshot),
        "why": {row.id: live.why_slow(row) for row in snapshot.slow},
        "series": live.series(snapshot),
        "curl": _curl(snapshot.routes[0][0] if snapshot.routes else "MODEL"),
    }
    return render(request, "dashboards/overview.html", context)


def _curl(model: str) -> str:
    return (
        f"curl {settings.PUBLIC_URL}/v1/chat/completions \\\n"
        '  -H "Authorization: Bearer $FANLIGHT_KEY" -H "Content-Type: application/json" \\\n'
        f'  -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}\''
    )
