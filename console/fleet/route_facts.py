"""A route as JSON tells it, for commands and the API."""

from __future__ import annotations

from typing import Any

from console.fleet.models import Route, RouteTarget
from console.fleet.route_actions import ROUTE_CHECKS


def route_facts(route: Route) -> dict[str, Any]:
    """Its rules, its targets with weight, role and how a canary or shadow does, its fallbacks in their order."""
    targets = route.targets.select_related("deployment", "analysis")
    fallbacks = route.fallbacks.select_related("deployment")
    return {
        "id": str(route.id),
        "name": route.name,
        **{name: getattr(route, name) for name in ROUTE_CHECKS},
        "targets": [
            {"deployment": t.deployment.name, "weight": t.weight, "role": t.role, **_unevaluated(t), **_analysis(t)}
            for t in targets
        ],
        "fallbacks": [fallback.deployment.name for fallback in fallbacks],
    }


def _unevaluated(target: RouteTarget) -> dict[str, Any]:
    """Only told of a target that may have more than its deployment's evaluation allows."""
    return {"unevaluated": True} if target.unevaluated else {}


def _analysis(target: RouteTarget) -> dict[str, Any]:
    """Empty for a target that nobody judges."""
    found = getattr(target, "analysis", None)
    if found is None or target.role == RouteTarget.Role.STABLE:
        return {}
    told = {"state": found.state, "since": found.since.isoformat(), "reason": found.reason, "measures": found.measures}
    return {"analysis": told}
