"""Routes, for admins: where the requests for a public name go, under which rules, and what they cost."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from console.base.views import actor_of
from console.errors import ConsoleError
from console.fleet.models import Deployment, Replica, Route, RouteTarget
from console.fleet.objectives import Objective, objectives
from console.fleet.route_actions import (
    ROUTE_CHECKS,
    TARGET_CHECKS,
    create_route,
    deployment_named,
    remove_target,
    set_fallbacks,
    set_route,
    set_target,
)
from console.fleet.route_rows import RouteRow, objective_rows, rule_rows
from console.pricing.actions import PRICE_CHECKS, set_price
from console.pricing.queries import history
from console.telemetry.queries import TooSlow, reading
from console.telemetry.route_figures import Measured, measured
from console.telemetry.windows import latest
from console.tenants.models import Tenant


@require_GET
def routes(request: HttpRequest) -> HttpResponse:
    """Every route with its targets, objectives and prices in force."""
    _admins_only(request)
    found = Route.objects.prefetch_related("targets__deployment", "fallbacks__deployment")
    prices = [version.price for version in history() if version.state == "in force"]
    ready = _ready()
    context = {
        "rows": [
            RouteRow.of(route, ready, [price for price in prices if price.model == route.name]) for route in found
        ],
        "deployments": Deployment.objects.all(),
    }
    return render(request, "fleet/routes.html", context)


@require_GET
def route(request: HttpRequest, route_id: uuid.UUID) -> HttpResponse:
    """One route with everything that can be set."""
    _admins_only(request)
    found = get_object_or_404(
        Route.objects.prefetch_related("targets__deployment", "targets__analysis", "fallbacks__deployment"), pk=route_id
    )
    versions = history([found.name])
    context = {
        "row": RouteRow.of(found, _ready(), [v.price for v in versions if v.state == "in force"]),
        "route": found,
        "rules": rule_rows(found),
        "objectives": objective_rows(found),
        "attained": _attained(found),
        "policies": Route.Policy.choices,
        "roles": RouteTarget.Role.choices,
        "deployments": Deployment.objects.all(),
        "versions": versions,
        "currencies": sorted({"USD", *Tenant.objects.values_list("currency", flat=True)}),
    }
    return render(request, "fleet/route.html", context)


@require_POST
def create(request: HttpRequest) -> HttpResponse:
    """A new public name, with its first deployment where one was chosen."""
    _admins_only(request)
    try:
        with transaction.atomic():
            made = create_route(actor_of(request), request.POST.get("name", "").strip())
            if request.POST.get("deployment"):
                set_target(actor_of(request), made, deployment_named(request.POST["deployment"]), {})
    except ConsoleError as error:
        messages.error(request, str(error))
        return redirect("routes")
    return redirect("route", route_id=made.id)


@require_POST
def rules(request: HttpRequest, route_id: uuid.UUID) -> HttpResponse:
    """Change policy, bounds, deadlines, objectives and fallbacks."""

    def act(found: Route) -> None:
        set_route(actor_of(request), found, _given(request, ROUTE_CHECKS))
        if "fallbacks" in request.POST:
            names = request.POST["fallbacks"].split(",")
            set_fallbacks(actor_of(request), found, [name.strip() for name in names if name.strip()])

    return _act(request, route_id, act)


@require_POST
def target(request: HttpRequest, route_id: uuid.UUID) -> HttpResponse:
    """Add a deployment, change its weight or role, or take it out."""

    def act(found: Route) -> None:
        deployment = deployment_named(request.POST.get("deployment", ""))
        if request.POST.get("remove"):
            remove_target(actor_of(request), found, deployment)
        else:
            set_target(actor_of(request), found, deployment, _given(request, TARGET_CHECKS))

    return _act(request, route_id, act)


@require_POST
def price(request: HttpRequest, route_id: uuid.UUID) -> HttpResponse:
    """Add the next version of its price; a time without an offset is the viewer's."""

    def act(found: Route) -> None:
        values = _given(request, PRICE_CHECKS) | {"model": found.name}
        try:
            at = parse_datetime(values.get("effective_at", ""))
        except ValueError:  # the action says what is wrong with it
            at = None
        if at is not None and timezone.is_naive(at):
            values["effective_at"] = timezone.make_aware(at)
        set_price(actor_of(request), values)

    return _act(request, route_id, act)


def _act(request: HttpRequest, route_id: uuid.UUID, act: Callable[[Route], None]) -> HttpResponse:
    _admins_only(request)
    found = get_object_or_404(Route, pk=route_id)
    try:
        with transaction.atomic():
            act(found)
    except ConsoleError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, _("Saved. Gateways know it within a second."))
    return redirect("route", route_id=found.id)


def _given(request: HttpRequest, names: Any) -> dict[str, Any]:
    return {name: request.POST[name] for name in names if name in request.POST}


def _attained(found: Route) -> list[Objective] | None:
    """The objectives as they were kept; None where the database needs too long to tell."""
    try:
        with reading():
            return objectives(found, [(key, _measured(found, key)) for key in ("1h", "24h")])
    except TooSlow:
        return None


def _measured(found: Route, key: str) -> Measured:
    return measured(found.name, latest(key), found.objective_ttft_p99_ms, found.objective_itl_p99_ms)


def _ready() -> dict[uuid.UUID, int]:
    """Ready replicas by deployment."""
    ready: dict[uuid.UUID, int] = {}
    for deployment_id in Replica.objects.filter(state=Replica.State.READY).values_list("deployment_id", flat=True):
        ready[deployment_id] = ready.get(deployment_id, 0) + 1
    return ready


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
