"""Models and runtimes over JSON, for platform admins."""

from __future__ import annotations

import uuid

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from console.base.api import Reply, body_of
from console.base.views import actor_of
from console.catalog import actions
from console.catalog.actions import model_facts, runtime_facts
from console.catalog.models import Model, Runtime
from console.errors import Refused


def models(request: HttpRequest) -> Reply:
    """Every model with its facts and how far its fetching is."""
    _admins_only(request)
    return {"data": [model_facts(model) for model in Model.objects.all()]}


def register(request: HttpRequest) -> Reply:
    """A new model: its name, source, and where they are known sha256 and licence."""
    values = body_of(request)
    return model_facts(actions.register(actor_of(request), values.pop("name", ""), values))


def model(request: HttpRequest, model_id: uuid.UUID) -> Reply:
    """One model."""
    _admins_only(request)
    return model_facts(get_object_or_404(Model, pk=model_id))


def remove(request: HttpRequest, model_id: uuid.UUID) -> Reply:
    """Forget a model that nothing runs."""
    _admins_only(request)
    found = get_object_or_404(Model, pk=model_id)
    actions.remove(actor_of(request), found)
    return {"removed": str(model_id)}


def retry(request: HttpRequest, model_id: uuid.UUID) -> Reply:
    """Fetch and check it again."""
    _admins_only(request)
    return model_facts(actions.retry(actor_of(request), get_object_or_404(Model, pk=model_id)))


def convert(request: HttpRequest, model_id: uuid.UUID) -> Reply:
    """A GGUF model as safetensors; `name` of the new one may be given."""
    _admins_only(request)
    found, values = get_object_or_404(Model, pk=model_id), body_of(request)
    name = values.get("name", "")
    return model_facts(actions.convert(actor_of(request), found, name if isinstance(name, str) else ""))


def runtimes(request: HttpRequest) -> Reply:
    """Every runtime, and how far its installation is."""
    _admins_only(request)
    return {"data": [runtime_facts(runtime) for runtime in Runtime.objects.all()]}


def add_runtime(request: HttpRequest) -> Reply:
    """A new runtime: `requirement`; `path` of an environment that is there; `extra`, a list of requirements."""
    _admins_only(request)
    values = body_of(request)
    requirement, path, extra = values.get("requirement"), values.get("path", ""), values.get("extra", [])
    if not isinstance(requirement, str) or not isinstance(path, str):
        raise Refused("requirement and path must be text.", "requirement")
    if not isinstance(extra, list) or not all(isinstance(each, str) for each in extra):
        raise Refused("extra must be a list of requirements.", "extra")
    return runtime_facts(actions.add_runtime(actor_of(request), requirement, path, tuple(extra)))


def remove_runtime(request: HttpRequest, runtime_id: uuid.UUID) -> Reply:
    """Forget a runtime that nothing uses, and delete its environment."""
    _admins_only(request)
    found = get_object_or_404(Runtime, pk=runtime_id)
    actions.remove_runtime(actor_of(request), found)
    return {"removed": str(runtime_id)}


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
