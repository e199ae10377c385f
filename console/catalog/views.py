"""Models: their facts and where they run."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.catalog.models import Model
from console.fleet.models import Replica


@require_GET
def models(request: HttpRequest) -> HttpResponse:
    """The catalog. Sources and reasons can hold paths of the machine: only admins see those."""
    found = list(Model.objects.prefetch_related("deployments__replicas", "deployments__routes"))
    rows = []
    for model in found:
        deployments = list(model.deployments.all())
        rows.append(
            {
                "model": model,
                "deployments": deployments,
                "routes": sorted({route.name for d in deployments for route in d.routes.all()}),
                "ready": sum(1 for d in deployments for r in d.replicas.all() if r.state == Replica.State.READY),
                "replicas": sum(len(d.replicas.all()) for d in deployments),
                "context_kv": model.kv_bytes_per_token * model.context_length
                if model.kv_bytes_per_token and model.context_length
                else None,
            }
        )
    disk = sum(m.disk_bytes or 0 for m in found)
    return render(request, "catalog/models.html", {"rows": rows, "disk": disk})
