"""GET /v1/models and /v1/models/{name}: the routes that a key may use."""

from __future__ import annotations

from typing import Any

from serving import auth
from serving.admission import model_not_found
from serving.port import Principal, Route, Snapshot

PATH = "/v1/models"


def listing(principal: Principal, snapshot: Snapshot) -> dict[str, Any]:
    """All of them, by name."""
    routes = sorted(snapshot.routes.values(), key=lambda route: route.name)
    data = [_told(route) for route in routes if auth.may_use(principal, route)]
    return {"object": "list", "data": data}


def one(name: str, principal: Principal, snapshot: Snapshot) -> dict[str, Any]:
    """One of them; raises NotFound for a name that is unknown or not for this key."""
    route = snapshot.routes.get(name)
    if route is None or not auth.may_use(principal, route):
        raise model_not_found(name)
    return _told(route)


def _told(route: Route) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": route.name,
        "object": "model",
        "created": route.created,
        "owned_by": route.owned_by,
    }
    if route.max_model_len:
        told["max_model_len"] = route.max_model_len
    return told
