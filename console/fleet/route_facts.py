"""A route as JSON tells it, for commands and the API."""

from __future__ import annotations

from typing import Any

from console.fleet.models import Route
from console.fleet.route_actions import ROUTE_CHECKS


def route_facts(route: Route) -> dict[str, Any]:
    """Its rules, its targets with weight and role, its fallbacks in their order."""
    targets = route.targets.select_related("deployment")
    fallbacks = route.fallbacks.select_related("deployment")
    return {
        "id": str(route.id),
        "name": route.name,
        **{name: getattr(route, name) for name in ROUTE_CHECKS},
        "targets": [{"deployment": t.deployment.name, "weight": t.weight, "role": t.role} for t in targets],
        "fallbacks": [fallback.deployment.name for fallback in fallbacks],
    }
