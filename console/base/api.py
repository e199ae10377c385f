"""The JSON API beside the pages: same people, same sessions, same actions; errors as {"error": {"message", "field"}}.

A browser's session and CSRF token are what it asks for (the token in the header X-CSRFToken), so that it opens no door
that the pages do not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from functools import wraps
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse

from console.errors import NotAllowed, Refused

PREFIX = "/api/"
Reply = dict[str, Any]


class BadBody(Refused):
    """What was sent is no JSON object."""


def endpoint(**methods: Callable[..., Reply]) -> Callable[..., HttpResponse]:
    """A view out of one function per method (get=…, post=…); each returns what is sent back as JSON."""

    @login_not_required  # who is not signed in gets JSON, not the way to a form
    def view(request: HttpRequest, **where: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return refusal(401, "Sign in first: this API uses the console's session.")
        handle = methods.get((request.method or "").lower())
        if handle is None:
            response = refusal(405, f"{request.method} is not possible here.")
            response.headers["Allow"] = ", ".join(sorted(methods)).upper()
            return response
        return _answer(handle, request, where)

    return wraps(next(iter(methods.values())))(view)


def _answer(handle: Callable[..., Reply], request: HttpRequest, where: dict[str, Any]) -> HttpResponse:
    try:
        return JsonResponse(handle(request, **where))
    except BadBody as error:
        return refusal(400, str(error))
    except Refused as error:
        return refusal(422, str(error), error.field)
    except NotAllowed as error:
        return refusal(403, str(error))
    except PermissionDenied:
        return refusal(403, "Your account does not reach this.")
    except Http404:
        return refusal(404, "There is nothing here, or it belongs to somebody else.")


def refusal(status: int, message: str, field: str = "") -> JsonResponse:
    """An error in the API's one form."""
    return JsonResponse({"error": {"message": message, "field": field or None}}, status=status)


def body_of(request: HttpRequest) -> dict[str, Any]:
    """The JSON object of a request, numbers with decimals kept exact. Raises BadBody."""
    if request.content_type != "application/json":
        raise BadBody("Send JSON: the Content-Type must be application/json.")
    try:
        body = json.loads(request.body, parse_float=Decimal, parse_constant=_no_number, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"The body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadBody("The body must be a JSON object.")
    return body


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found
