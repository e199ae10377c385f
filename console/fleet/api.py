"""Routes over JSON, for platform admins. `targets` and `fallbacks`, where given, are the whole list."""

from __future__ import annotations

import uuid
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from console.audit.actions import Actor
from console.base.api import Reply, body_of
from console.base.views import actor_of
from console.errors import Refused
from console.fleet.models import Route
from console.fleet.route_actions import (
    create_route,
    deployment_named,
    remove_target,
    set_fallbacks,
    set_route,
    set_target,
)
from console.fleet.route_facts import route_facts


def routes(request: HttpRequest) -> Reply:
    """Every route with its targets."""
    _admins_only(request)
    found = Route.objects.prefetch_related("targets__deployment", "fallbacks__deployment")
    return {"data": [route_facts(route) for route in found]}


@transaction.atomic
def create(request: HttpRequest) -> Reply:
    """A new route: its name, and anything that `change` takes."""
    values = body_of(request)
    name = values.pop("name", "")
    route = create_route(actor_of(request), name if isinstance(name, str) else "")
    return route_facts(_write(actor_of(request), route, values))


def route(request: HttpRequest, route_id: uuid.UUID) -> Reply:
    """One route."""
    _admins_only(request)
    return route_facts(get_object_or_404(Route, pk=route_id))


@transaction.atomic
def change(request: HttpRequest, route_id: uuid.UUID) -> Reply:
    """Change what is named, leave the rest; all of it or nothing."""
    _admins_only(request)
    found = get_object_or_404(Route, pk=route_id)
    return route_facts(_write(actor_of(request), found, body_of(request)))


def _write(actor: Actor, route: Route, values: dict[str, Any]) -> Route:
    targets, fallbacks = values.pop("targets", None), values.pop("fallbacks", None)
    route = set_route(actor, route, values)
    if targets is not None:
        _write_targets(actor, route, targets)
    if fallbacks is not None:
        if not isinstance(fallbacks, list):
            raise Refused("fallbacks must be a list of names of deployments.", "fallbacks")
        set_fallbacks(actor, route, [deployment_named(name, "fallbacks").name for name in fallbacks])
    return route


def _write_targets(actor: Actor, route: Route, targets: Any) -> None:
    if not isinstance(targets, list) or not all(isinstance(target, dict) for target in targets):
        raise Refused("targets must be a list of objects with deployment, weight and role.", "targets")
    wanted = [(deployment_named(t.pop("deployment", None), "targets.deployment"), t) for t in map(dict, targets)]
    if len({deployment.pk for deployment, _values in wanted}) != len(wanted):
        raise Refused("targets names a deployment twice.", "targets.deployment")
    names = {deployment.name for deployment, _values in wanted}
    wanted.sort(key=lambda each: each[0].quantisation != "")  # these get their small share of what the others have
    try:
        for deployment, values in wanted:
            set_target(actor, route, deployment, values)
        for target in route.targets.select_related("deployment").exclude(deployment__name__in=names):
            remove_target(actor, route, target.deployment)
    except Refused as error:
        raise Refused(str(error), f"targets.{error.field}") from None


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
