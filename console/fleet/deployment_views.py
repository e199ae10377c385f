"""Deployments, for admins: the form with its memory plan, one deployment with all that happens to it, and its log."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.base.views import actor_of
from console.catalog.models import Model, Runtime
from console.errors import ConsoleError
from console.fleet.deploy_plan import Draft, draft
from console.fleet.deployment_actions import (
    assembled,
    create_deployment,
    drafted,
    engine_of,
    remove_deployment,
    roll_back,
    scale,
    set_deployment,
)
from console.fleet.deployment_detail import Detail, Log, log_of
from console.fleet.deployment_form import engines, parameter_rows, values_of
from console.fleet.models import Deployment
from console.placement.models import Device
from engine.adapters.recommend import USES, recommend
from serving.port import PRIORITIES


@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """The form of a new deployment; GET fields choose model and engine, so that it shows what belongs to them."""
    _admins_only(request)
    if request.method == "POST":
        return _create(request)
    return render(request, "fleet/deploy.html", _form_context(request, None))


@require_http_methods(["GET", "POST"])
def edit(request: HttpRequest, deployment_id: uuid.UUID) -> HttpResponse:
    """The same form of one that there is: model and engine stay."""
    _admins_only(request)
    found = _found(deployment_id)
    if request.method == "POST":
        values = values_of(request.POST, free_arguments=_free(request))

        def change() -> None:
            set_deployment(actor_of(request), found, values)

        return _act(request, found, change, _("Saved. What workers are started with is rolled out one by one."))
    return render(request, "fleet/deploy.html", _form_context(request, found))


@require_GET
def plan(request: HttpRequest) -> HttpResponse:
    """The plan of what the form holds now."""
    _admins_only(request)
    asked = _uuid(request.GET.get("deployment", ""))
    known = _found(asked) if asked else None
    return render(request, "fleet/_plan.html", _plan_context(request, known))


@require_GET
def deployment(request: HttpRequest, deployment_id: uuid.UUID) -> HttpResponse:
    """One deployment: rollout, replicas, stacks of hung workers, autoscaler, transitions, log."""
    _admins_only(request)
    found = _found(deployment_id)
    template = "fleet/_deployment.html" if request.headers.get("HX-Request") else "fleet/deployment.html"
    return render(request, template, {"d": found, "x": Detail.of(found), "log": _log(request, found)})


@require_GET
def log(request: HttpRequest, deployment_id: uuid.UUID) -> HttpResponse:
    """The newest lines of its workers' logs, or those that hold a text."""
    _admins_only(request)
    found = _found(deployment_id)
    return render(request, "fleet/_log.html", {"d": found, "log": _log(request, found)})


@require_POST
def rescale(request: HttpRequest, deployment_id: uuid.UUID) -> HttpResponse:
    """Have so many replicas."""
    _admins_only(request)
    found = _found(deployment_id)
    count = request.POST.get("replicas", "")
    return _act(request, found, lambda: scale(actor_of(request), found, count), _("The controller makes it so."))


@require_POST
def back(request: HttpRequest, deployment_id: uuid.UUID) -> HttpResponse:
    """Make an earlier revision the newest."""
    _admins_only(request)
    found = _found(deployment_id)
    number = request.POST.get("revision", "")
    return _act(request, found, lambda: roll_back(actor_of(request), found, number), _("It is being rolled out."))


@require_POST
def remove(request: HttpRequest, deployment_id: uuid.UUID) -> HttpResponse:
    """Forget one that has no workers and no routes."""
    _admins_only(request)
    found = _found(deployment_id)
    try:
        remove_deployment(actor_of(request), found)
    except ConsoleError as error:
        messages.error(request, str(error))
        return redirect("deployment", deployment_id=found.id)
    messages.success(request, _("%(name)s is removed.") % {"name": found.name})
    return redirect("deployments")


def _create(request: HttpRequest) -> HttpResponse:
    values = values_of(request.POST, free_arguments=_free(request))
    values |= {name: request.POST.get(name, "") for name in ("model", "engine", "route")}
    try:
        with transaction.atomic():
            made = create_deployment(actor_of(request), request.POST.get("name", "").strip(), values)
    except ConsoleError as error:
        messages.error(request, str(error))
        return render(request, "fleet/deploy.html", _form_context(request, None), status=422)
    messages.success(request, _("%(name)s is placed and started.") % {"name": made.name})
    return redirect("deployment", deployment_id=made.id)


def _form_context(request: HttpRequest, known: Deployment | None) -> dict[str, Any]:
    """Everything the form shows: what is there, or what was typed when it was refused."""
    data = request.POST if request.method == "POST" else request.GET
    models = list(Model.objects.filter(state=Model.State.READY).exclude(format=""))
    context = _plan_context(request, known)
    shown: Deployment | None = context["shown"]
    model = shown.model if shown else None
    engine = shown.engine if shown else data.get("engine", Deployment.Engine.EMBEDDED)
    kind = context["draft"].sizing.kind if context["draft"].sizing else "cpu"
    return context | {
        "known": known,
        "models": models,
        "model": model,
        "name": data.get("name", known.name if known else _free_name(model)),
        "route": data.get("route", ""),
        "engines": engines(model, engine),
        **_advised(data.get("use", "chat"), model),
        **(_of_engine(shown, kind) if shown else {}),
        "devices": Device.objects.select_related("node").filter(lost_at=None),
        "classes": PRIORITIES,
        "signals": Deployment.Signal.choices,
        "spreads": Deployment.Spread.choices,
        "free_arguments": _free(request),
    }


def _of_engine(shown: Deployment, kind: str) -> dict[str, Any]:
    """What the form shows for this engine and no other."""
    engine = engine_of(shown)
    return {
        "parameters": parameter_rows(shown, kind),
        "variables": [
            {"name": name, "help": help_text, "value": shown.environment.get(name, "")}
            for name, help_text in engine.variables.items()
        ],
        "quantisations": [each for each in engine.capabilities.quantisations if each],
        "lends": engine.capabilities.lends,
        "runtimes": next(row.runtimes for row in engines(None, shown.engine) if row.chosen),
    }


def _advised(use: str, model: Model | None) -> dict[str, Any]:
    """Which engine is recommended for what it is for, on the cards that there are."""
    cards = set(Device.objects.filter(kind=Device.Kind.GPU, lost_at=None).values_list("uid", "name"))
    kinds = {name for _uid, name in cards}
    form = model.format if model and model.format else "safetensors"
    return {
        "use": use if use in USES else "chat",
        "uses": USES.items(),
        "recommended": recommend(use, gpus=len(cards), uniform=len(kinds) < 2, format=form),
    }


def _free_name(model: Model | None) -> str:
    """A name that nothing has yet."""
    if model is None:
        return ""
    base = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in model.name).lower()[:70]
    taken = set(Deployment.objects.filter(name__startswith=base).values_list("name", flat=True))
    return next(name for name in (base, *(f"{base}-{n}" for n in range(2, 10_000))) if name not in taken)


def _plan_context(request: HttpRequest, known: Deployment | None) -> dict[str, Any]:
    """The deployment that the form describes, its plan, and what was wrong with it."""
    data = request.POST if request.method == "POST" else request.GET
    problem, field = "", ""
    shown = known
    try:
        if shown is None:
            shown = drafted(data.get("model") or _first_model(), data.get("engine") or Deployment.Engine.EMBEDDED.value)
            shown.runtime = _newest_runtime(shown.engine)
        if set(data) - {"model", "engine", "deployment", "use"}:
            assembled(actor_of(request), shown, values_of(data, free_arguments=_free(request)))
    except ConsoleError as error:
        problem, field = str(error), getattr(error, "field", "")
    found = draft(shown) if shown is not None else Draft(error=problem, field=field)
    return {"shown": shown, "draft": found, "problem": problem or found.error, "field": field or found.field}


def _newest_runtime(engine: str) -> Runtime | None:
    return next((row.runtimes[0] for row in engines(None, engine) if row.chosen and row.runtimes), None)


def _first_model() -> str:
    found = Model.objects.filter(state=Model.State.READY).exclude(format="").first()
    return found.name if found else ""


def _log(request: HttpRequest, found: Deployment) -> Log:
    return log_of(found, request.GET.get("find", "")[:200])


def _act(request: HttpRequest, found: Deployment, act: Callable[[], object], done: str) -> HttpResponse:
    try:
        act()
    except ConsoleError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, done)
    return redirect("deployment", deployment_id=found.id)


def _found(deployment_id: uuid.UUID) -> Deployment:
    ours = Deployment.objects.exclude(engine=Deployment.Engine.EXTERNAL).select_related("model", "runtime")
    return get_object_or_404(ours, pk=deployment_id)


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def _free(request: HttpRequest) -> bool:
    return request.user.has_perm("fleet.free_arguments")


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
