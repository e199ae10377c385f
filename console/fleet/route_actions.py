"""Write routes: the public name, its rules, its targets with their weights, and what answers when none of them can."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import IntegrityError, transaction

from console.audit.actions import Actor, change, record
from console.base.fields import Check, checked, choice, flag, number, optional, whole
from console.errors import NotAllowed, Refused
from console.fleet.models import Deployment, Route, RouteFallback, RouteTarget

_TOKENS = whole(0, 100_000_000)

ROUTE_CHECKS: Mapping[str, Check] = {
    "policy": choice(Route.Policy.values),
    "sticky": flag,
    "queue_timeout_s": number(0, 600),
    "max_queued": whole(0, 1_000_000),
    "max_queued_tokens": whole(0, 2_000_000_000),
    "max_attempts": whole(1, 10),
    "hedge_after_s": optional(number(0.01, 600)),
    "max_model_len": _TOKENS,
    "max_prompt_tokens": _TOKENS,
    "default_max_tokens": optional(whole(1, 100_000_000)),
    "deadline_s": number(1, 86_400),
    "first_token_deadline_s": number(1, 86_400),
    "inter_token_deadline_s": number(1, 86_400),
    "on_stopped": choice(("refuse", "hold")),
    "hold_s": number(1, 3600),
    "max_held": whole(0, 100_000),
    "objective_availability": optional(number(0.5, 1)),
    "objective_ttft_p99_ms": optional(number(1, 3_600_000)),
    "objective_itl_p99_ms": optional(number(1, 3_600_000)),
    "objective_jitter": optional(number(1, 1000)),
}
TARGET_CHECKS: Mapping[str, Check] = {
    "weight": whole(0, 10_000),
    "role": choice(RouteTarget.Role.values),
    "unevaluated": flag,
}
UNEVALUATED_SHARE = 0.05
"""Of a route, at most, for a quantised deployment that was not evaluated against its full-precision twin."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,119}")


@transaction.atomic
def create_route(actor: Actor, name: str, values: Mapping[str, Any] | None = None) -> Route:
    """Make a public name without targets: until it has one, its requests get 503."""
    _admins_only(actor)
    if not _NAME.fullmatch(name):
        raise Refused("name must be letters, digits and . _ : / @ + -, at most 120 of them.", "name")
    if Route.objects.filter(name=name).exists():
        raise Refused(f"There is a route named {name} already.", "name")
    found = checked(ROUTE_CHECKS, values or {})
    try:
        route = Route.objects.create(name=name, **found)
    except IntegrityError:  # somebody else was a moment earlier
        raise Refused(f"There is a route named {name} already.", "name") from None
    record(actor, "route.create", route, None, **found)
    return route


@transaction.atomic
def set_route(actor: Actor, route: Route, values: Mapping[str, Any]) -> Route:
    """Set policy, bounds, deadlines and objectives; what is not named stays."""
    _admins_only(actor)
    found = checked(ROUTE_CHECKS, values)
    route = Route.objects.select_for_update().get(pk=route.pk)
    changed = change(route, found)
    if changed:
        record(actor, "route.set", route, None, **changed)
    return route


@transaction.atomic
def set_target(actor: Actor, route: Route, deployment: Deployment, values: Mapping[str, Any]) -> RouteTarget:
    """Add a deployment to a route, or change its weight or role there.

    Raises Refused where one that is not evaluated would take too much, unless `unevaluated` says that it may.
    """
    _admins_only(actor)
    target = _write_target(actor, route, deployment, checked(TARGET_CHECKS, values))
    check_shares(route)
    return target


def _write_target(actor: Actor, route: Route, deployment: Deployment, found: Mapping[str, Any]) -> RouteTarget:
    target = RouteTarget.objects.select_for_update().filter(route=route, deployment=deployment).first()
    role = found.get("role") or (target.role if target else RouteTarget.Role.STABLE)
    weight = found.get("weight", target.weight if target else 100)
    if role == RouteTarget.Role.SHADOW and weight > 100:
        raise Refused("weight of a shadow is a share of the requests: 0 to 100 percent.", "weight")
    if target is None:
        columns = {**found, "weight": weight, "role": role}
        target = RouteTarget.objects.create(route=route, deployment=deployment, **columns)
        added = {name: [None, value] for name, value in columns.items()}
        record(actor, "route.target", route, None, deployment=deployment.name, **added)
        return target
    changed = change(target, {**found, "weight": weight, "role": role})
    if changed:
        record(actor, "route.target", route, None, deployment=deployment.name, **changed)
    return target


@transaction.atomic
def remove_target(actor: Actor, route: Route, deployment: Deployment) -> None:
    """Take a deployment out of a route; running requests finish where they are."""
    _admins_only(actor)
    removed, _rows = RouteTarget.objects.filter(route=route, deployment=deployment).delete()
    if not removed:
        raise Refused(f"{deployment} is no target of {route}.", "deployment")
    record(actor, "route.target", route, deployment=deployment.name, removed=True)
    check_shares(route)


def check_shares(route: Route) -> None:
    """Raise Refused where a quantised deployment that was not evaluated has more of a route than it may."""
    targets = route.targets.exclude(role=RouteTarget.Role.SHADOW).select_related("deployment")
    total = sum(each.weight for each in targets)
    for each in targets:
        deployment = each.deployment
        free = each.unevaluated or deployment.evaluated or not deployment.quantisation
        if not free and each.weight > UNEVALUATED_SHARE * total:
            raise Refused(
                f"{deployment} is quantised ({deployment.quantisation}) and not evaluated: it may take "
                f"{UNEVALUATED_SHARE:.0%} of {route}, and would take {each.weight / total:.0%}. Lower its weight, or "
                "set unevaluated on the target, which the audit log keeps.",
                "weight",
            )


@transaction.atomic
def set_fallbacks(actor: Actor, route: Route, names: Sequence[str]) -> None:
    """Which deployments answer, in this order, when no target can. An empty list: none."""
    _admins_only(actor)
    if len(set(names)) != len(names):
        raise Refused("fallbacks names a deployment twice.", "fallbacks")
    deployments = [deployment_named(name, "fallbacks") for name in names]
    Route.objects.select_for_update().get(pk=route.pk)
    old = [fallback.deployment.name for fallback in route.fallbacks.select_related("deployment")]
    if old == list(names):
        return
    route.fallbacks.all().delete()
    RouteFallback.objects.bulk_create(
        RouteFallback(route=route, deployment=each, position=n) for n, each in enumerate(deployments, start=1)
    )
    record(actor, "route.fallbacks", route, fallbacks=[old, list(names)])


def deployment_named(name: Any, field: str = "deployment") -> Deployment:
    """The deployment of this name. Raises Refused, listing the ones there are."""
    found = None
    if isinstance(name, str) and name.isprintable():  # the database refuses to look for some other characters
        found = Deployment.objects.filter(name=name).first()
    if found is None:
        known = ", ".join(Deployment.objects.values_list("name", flat=True)[:20]) or "none"
        raise Refused(f"There is no deployment named {str(name)[:80]}. Known: {known}.", field)
    return found


def _admins_only(actor: Actor) -> None:
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can change routes.")
