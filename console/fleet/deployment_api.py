"""Deployments over JSON, for platform admins."""

from __future__ import annotations

import uuid

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from console.base.api import Reply, body_of
from console.base.views import actor_of
from console.errors import Refused
from console.fleet.deployment_actions import (
    create_deployment,
    remove_deployment,
    roll_back,
    scale,
    set_deployment,
)
from console.fleet.deployment_facts import deployment_facts
from console.fleet.models import Deployment


def deployments(request: HttpRequest) -> Reply:
    """Every deployment that we run, with its replicas."""
    _admins_only(request)
    found = Deployment.objects.exclude(engine=Deployment.Engine.EXTERNAL).select_related("model", "runtime")
    return {"data": [deployment_facts(each) for each in found.prefetch_related("routes", "replicas")]}


def create(request: HttpRequest) -> Reply:
    """A new deployment: name, model, engine, and anything that `change` takes; `route` names a public name for it."""
    values = body_of(request)
    made = create_deployment(actor_of(request), values.pop("name", ""), values)
    return deployment_facts(Deployment.objects.get(pk=made.pk))


def deployment(request: HttpRequest, deployment_id: uuid.UUID) -> Reply:
    """One deployment."""
    _admins_only(request)
    return deployment_facts(_found(deployment_id))


def change(request: HttpRequest, deployment_id: uuid.UUID) -> Reply:
    """Change what is named, leave the rest; `parameters`, where given, are all of them."""
    _admins_only(request)
    set_deployment(actor_of(request), _found(deployment_id), body_of(request))
    return deployment_facts(_found(deployment_id))


def remove(request: HttpRequest, deployment_id: uuid.UUID) -> Reply:
    """Forget one that has no workers and no routes."""
    _admins_only(request)
    remove_deployment(actor_of(request), _found(deployment_id))
    return {"removed": str(deployment_id)}


def rescale(request: HttpRequest, deployment_id: uuid.UUID) -> Reply:
    """Have so many `replicas`."""
    _admins_only(request)
    scale(actor_of(request), _found(deployment_id), _only(request, "replicas"))
    return deployment_facts(_found(deployment_id))


def back(request: HttpRequest, deployment_id: uuid.UUID) -> Reply:
    """Make an earlier `revision` the newest."""
    _admins_only(request)
    roll_back(actor_of(request), _found(deployment_id), _only(request, "revision"))
    return deployment_facts(_found(deployment_id))


def _only(request: HttpRequest, name: str) -> object:
    body = body_of(request)
    if set(body) != {name}:
        raise Refused(f"The body must hold {name} and nothing else.", name)
    return body[name]


def _found(deployment_id: uuid.UUID) -> Deployment:
    return get_object_or_404(Deployment.objects.select_related("model", "runtime"), pk=deployment_id)


def _admins_only(request: HttpRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied
