"""A deployment as JSON tells it, for commands and the API."""

from __future__ import annotations

from typing import Any

from console.base.fields import told
from console.fleet.deployment_actions import CHECKS
from console.fleet.models import Deployment, Replica


def deployment_facts(deployment: Deployment) -> dict[str, Any]:
    """What is wanted, which revision of it, and each replica with its state and why."""
    columns = {name: told(getattr(deployment, name)) for name in CHECKS if name != "runtime"}
    return {
        "id": str(deployment.id),
        "name": deployment.name,
        "model": deployment.model.name,
        "engine": deployment.engine,
        "runtime": deployment.runtime.requirement if deployment.runtime else None,
        **columns,
        "revision": deployment.revision,
        "evaluated": deployment.evaluated,
        "start_s": deployment.start_s,
        "sweep": deployment.sweep,
        "routes": sorted(route.name for route in deployment.routes.all()),
        "replicas": [replica_facts(replica) for replica in deployment.replicas.all()],
    }


def replica_facts(replica: Replica) -> dict[str, Any]:
    """One replica: where it runs, since when, and the reason of its state."""
    return {
        "id": str(replica.id),
        "name": f"r{replica.ordinal}",
        "state": replica.state,
        "reason": replica.reason,
        "revision": replica.revision,
        "wanted": replica.wanted,
        "device": replica.device,
        "devices": replica.devices,
        "pid": replica.pid,
        "restarts": replica.restarts,
        "engine_version": replica.engine_version,
        "ready_at": told(replica.ready_at),
    }
