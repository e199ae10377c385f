"""How long starts take: learnt from those that there were, for whoever waits for the next one."""

from __future__ import annotations

from django.db.models import Avg
from django.utils import timezone

from console.fleet.models import Deployment, Replica
from engine.adapters import ADAPTERS

LONGEST_S = 3600.0
DIFFERS = 0.05  # less of a change is not written: every write makes gateways read their configuration again
UNKNOWN_S = 120.0
State = Replica.State


def learn(replica: Replica) -> None:
    """A replica has just become ready: its deployment's starts take half of what they took, and half of this."""
    if replica.started_at is None or replica.ready_at is None:
        return
    took = min(max(0.1, (replica.ready_at - replica.started_at).total_seconds()), LONGEST_S)
    before = replica.deployment.start_s
    expected = took if before is None else (before + took) / 2
    if before is None or abs(expected - before) > DIFFERS * before:
        replica.deployment.start_s = expected
        Deployment.objects.filter(pk=replica.deployment_id).update(start_s=expected)


def start_eta_s(deployment: Deployment) -> float:
    """Seconds that a start of a deployment should take: as its own did, as those of its engine, or as is usual."""
    if deployment.start_s is not None:
        return deployment.start_s
    alike = Deployment.objects.filter(engine=deployment.engine, runtime=deployment.runtime_id, start_s__isnull=False)
    mean = alike.aggregate(mean=Avg("start_s"))["mean"]
    if mean is not None:
        return float(mean)
    known = ADAPTERS.get(deployment.engine)
    return UNKNOWN_S if known is None else known.cold_start_s


def ready_in_s(deployment: Deployment) -> float:
    """Seconds until a first replica should be ready: of a start that is under way, what is left of it, 1 at least."""
    expected = start_eta_s(deployment)
    loading = (State.STARTING, State.LOADING, State.VERIFYING)
    begun = deployment.replicas.filter(wanted=True, state__in=loading, started_at__isnull=False)
    first = begun.order_by("started_at").values_list("started_at", flat=True).first()
    if first is None:
        return expected
    return max(1.0, expected - (timezone.now() - first).total_seconds())
