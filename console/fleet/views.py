"""Deployments and their replicas, for admins: state, reasons, workers, live numbers."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.dashboards.overview import ReplicaNow
from console.fleet import live
from console.fleet.models import Deployment, Replica, Transition


@require_GET
def deployments(request: HttpRequest) -> HttpResponse:
    """Everything that should run and what does."""
    if not request.user.is_staff:
        raise PermissionDenied
    found = list(Deployment.objects.select_related("model").prefetch_related("routes"))
    replicas = list(Replica.objects.select_related("deployment"))
    stats = live.read(str(r.id) for r in replicas)
    by_deployment: dict[object, list[ReplicaNow]] = {}
    for replica in replicas:
        by_deployment.setdefault(replica.deployment_id, []).append(ReplicaNow.of(replica, stats.get(str(replica.id))))
    rows = [
        {
            "deployment": d,
            "replicas": by_deployment.get(d.id, []),
            "ready": sum(1 for r in by_deployment.get(d.id, []) if r.replica.state == Replica.State.READY),
        }
        for d in found
    ]
    context = {"rows": rows, "transitions": Transition.objects.all()[:40]}
    template = "fleet/_deployments.html" if request.headers.get("HX-Request") else "fleet/deployments.html"
    return render(request, template, context)
