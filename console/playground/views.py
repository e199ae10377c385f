"""The playground's page; answers come over its socket."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.fleet.models import Replica, Route
from console.playground.consumers import PARAMS
from console.tenants.queries import usable_tenants


@require_GET
def playground(request: HttpRequest) -> HttpResponse:
    """Chat with one or two models. A replay brings its model and parameters in the URL."""
    tenants = list(usable_tenants(request.user))
    wanted = request.GET.get("tenant", "")
    tenant = next((t for t in tenants if t.name == wanted), tenants[0] if tenants else None)
    routes = [_route(route) for route in Route.objects.prefetch_related("deployments__model", "deployments__replicas")]
    setup = {
        "routes": routes,
        "tenant": str(tenant.id) if tenant else "",
        "model": request.GET.get("model", ""),
        "params": {k: v for k, v in request.GET.items() if k in PARAMS},
        "base_url": f"{settings.PUBLIC_URL}/v1",
    }
    context = {"setup": setup, "routes": routes, "usable": tenants, "tenant": tenant}
    return render(request, "playground/playground.html", context)


def _route(route: Route) -> dict[str, Any]:
    deployments = list(route.deployments.all())
    model = deployments[0].model if deployments else None
    ready = sum(1 for d in deployments for r in d.replicas.all() if r.state == Replica.State.READY)
    return {
        "name": route.name,
        "context": route.max_model_len,
        "quantisation": model.quantisation if model else "",
        "engine": deployments[0].engine if deployments else "",
        "ready": ready,
    }
