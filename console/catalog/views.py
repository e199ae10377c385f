"""Models and runtimes: their facts, how far their fetching is, why one was refused, and where they run."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from console.base.views import actor_of
from console.catalog import actions
from console.catalog.models import Model, Runtime
from console.catalog.runtimes import RECIPES
from console.errors import ConsoleError
from console.fleet.models import Deployment, Replica

_CSS = {"ready": "good", "failed": "bad", "refused": "bad"}
_AT_WORK = {"registered", "fetching", "pending", "installing", "probing"}


@require_GET
def models(request: HttpRequest) -> HttpResponse:
    """The catalog. Sources and reasons can hold paths of the machine: only admins see those."""
    found = list(Model.objects.prefetch_related("deployments__replicas", "deployments__routes"))
    rows = [_row(model) for model in found]
    staff = bool(request.user.is_staff)
    runtimes = list(Runtime.objects.prefetch_related("deployments")) if staff else []
    refused = [row for row in rows if row["model"].state in {Model.State.REFUSED, Model.State.FAILED}]
    context = {
        "rows": rows,
        "refused": refused,
        "disk": sum(model.disk_bytes or 0 for model in found),
        "runtimes": [{"runtime": runtime, "css": _CSS.get(runtime.state, "busy")} for runtime in runtimes],
        "at_work": bool(({model.state for model in found} | {each.state for each in runtimes}) & _AT_WORK),
        "roots": settings.ENV["MODEL_ROOTS"],
        "mirror": settings.ENV["HF_MIRROR"],
        "engines": list(RECIPES),
        "may_run_code": request.user.has_perm(actions.FREE),
    }
    return render(request, "catalog/models.html", context)


@require_POST
def register(request: HttpRequest) -> HttpResponse:
    """Ask for a model."""

    def act() -> str:
        names = ("source", "sha256", "licence")
        values = {name: request.POST[name].strip() for name in names if request.POST.get(name)}
        model = actions.register(actor_of(request), request.POST.get("name", "").strip(), values)
        return _("%(name)s is registered. It is fetched, checked and read next.") % {"name": model}

    return _act(request, act)


@require_POST
def act(request: HttpRequest, model_id: uuid.UUID, what: str) -> HttpResponse:
    """Try a model again, convert it, or forget it."""
    _admins_only(request)
    model, actor = get_object_or_404(Model, pk=model_id), actor_of(request)

    def retry() -> str:
        actions.retry(actor, model)
        return _("%(name)s is checked again.") % {"name": model}

    def convert() -> str:
        made = actions.convert(actor, model)
        return _("%(name)s will be made out of it.") % {"name": made}

    def remove() -> str:
        actions.remove(actor, model)
        return _("%(name)s is forgotten.") % {"name": model}

    return _act(request, {"retry": retry, "convert": convert, "remove": remove}[what])


@require_POST
def add_runtime(request: HttpRequest) -> HttpResponse:
    """Ask for an engine version."""

    def act() -> str:
        requirement, path = request.POST.get("requirement", "").strip(), request.POST.get("path", "").strip()
        extra = tuple(request.POST.get("extra", "").split())
        runtime = actions.add_runtime(actor_of(request), requirement, path, extra)
        return _("%(name)s is installed next.") % {"name": runtime}

    return _act(request, act)


@require_POST
def remove_runtime(request: HttpRequest, runtime_id: uuid.UUID) -> HttpResponse:
    """Forget an engine version."""
    _admins_only(request)
    runtime = get_object_or_404(Runtime, pk=runtime_id)

    def act() -> str:
        actions.remove_runtime(actor_of(request), runtime)
        return _("%(name)s is forgotten.") % {"name": runtime}

    return _act(request, act)


def _act(request: HttpRequest, what: Callable[[], str]) -> HttpResponse:
    """Do it and say so on the page, or why not."""
    _admins_only(request)
    try:
        messages.success(request, what())
    except ConsoleError as error:
        messages.error(request, str(error))
    return redirect("models")


def _row(model: Model) -> dict[str, Any]:
    deployments: list[Deployment] = list(model.deployments.all())
    per_token = model.kv_bytes_per_token
    return {
        "model": model,
        "css": _CSS.get(model.state, "busy"),
        "deployments": deployments,
        "routes": sorted({route.name for d in deployments for route in d.routes.all()}),
        "ready": sum(1 for d in deployments for r in d.replicas.all() if r.state == Replica.State.READY),
        "replicas": sum(len(d.replicas.all()) for d in deployments),
        "context_kv": per_token * model.context_length if per_token and model.context_length else None,
        "kinds": sorted(model.weights_by_type.items(), key=lambda kind: -kind[1]),
    }


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
