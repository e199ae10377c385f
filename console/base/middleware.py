"""What a page needs to know of its viewer: language, theme, time zone; and that a first password must be changed."""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone, translation

ZONE_COOKIE = settings.SESSION_COOKIE_NAME.removesuffix("_session") + "_zone"
_FREE_OF_CHANGE = ("password", "logout", "preferences")


class ViewerMiddleware:
    """Activates the viewer's language and zone. Without a zone of their own, the browser's (a cookie), else UTC."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        user = request.user
        if user.is_authenticated and user.language in dict(settings.LANGUAGES):
            translation.activate(user.language)
            request.LANGUAGE_CODE = translation.get_language()
        chosen = user.time_zone if user.is_authenticated else ""
        with timezone.override(zone_of(chosen or request.COOKIES.get(ZONE_COOKIE, ""))):
            if user.is_authenticated and user.must_change_password and not self._may_pass(request):
                return redirect("password")
            response = self.get_response(request)
        response.headers.setdefault("Content-Language", translation.get_language() or "en")
        return response

    def _may_pass(self, request: HttpRequest) -> bool:
        return request.path in {reverse(name) for name in _FREE_OF_CHANGE}


def zone_of(name: str) -> zoneinfo.ZoneInfo:
    """A zone by its IANA name; UTC for a name that is none."""
    try:
        return zoneinfo.ZoneInfo(name or "UTC")
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return zoneinfo.ZoneInfo("UTC")
