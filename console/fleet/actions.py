"""Writes to the fleet: states of replicas (with a Transition each), deployments and routes."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils import timezone

from console.audit.actions import Actor, record
from console.catalog.models import Model
from console.fleet.models import Deployment, Replica, Route, RouteTarget, Transition


@transaction.atomic
def move_replica(replica: Replica, state: str, reason: str, **changes: Any) -> Replica:
    """Write a replica's new state and the Transition that says why. `changes` are other fields set with it."""
    old = replica.state
    replica.state = state
    replica.reason = reason
    if state != old:
        changes = {"state_at": timezone.now(), **changes}
    for name, value in changes.items():
        setattr(replica, name, value)
    replica.save(update_fields=["state", "reason", *changes])
    Transition.objects.create(
        subject_type="replica",
        subject_id=replica.id,
        subject_label=str(replica),
        old=old,
        new=state,
        reason=reason,
        details={"epoch": replica.epoch, "pid": replica.pid},
    )
    return replica


def ensure_replicas(deployment: Deployment) -> list[Replica]:
    """One row per ordinal up to the wanted number; rows beyond it stay. Of external endpoints, and in tests.

    Which replicas a deployment with workers has is decided by fleet.replicas.
    """
    have = {replica.ordinal: replica for replica in deployment.replicas.select_related("deployment")}
    for ordinal in range(1, deployment.desired_replicas + 1):
        if ordinal not in have:
            have[ordinal] = Replica.objects.create(deployment=deployment, ordinal=ordinal)
    return [have[ordinal] for ordinal in sorted(have)]


@transaction.atomic
def deploy(actor: Actor, model: Model, name: str, route_name: str) -> Deployment:
    """Deploy a model on the embedded engine under a public name. Idempotent: what is there is left as it is."""
    deployment, created = Deployment.objects.get_or_create(name=name, defaults={"model": model})
    if created:
        record(actor, "deployment.create", deployment, model=model.name)
    route, route_created = Route.objects.get_or_create(
        name=route_name, defaults={"max_model_len": model.context_length or 0}
    )
    if route_created:
        RouteTarget.objects.create(route=route, deployment=deployment)
        record(actor, "route.create", route, deployment=name)
    return deployment
