"""Write what the autoscaler decided: the new number, the decision with its reason, and an audit entry."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from console.audit.actions import Actor, record
from console.fleet.autoscaler import Verdict
from console.fleet.models import Deployment, ScaleDecision

AUTOSCALER = Actor(name="autoscaler")


@transaction.atomic
def decided(deployment: Deployment, verdict: Verdict, signal: dict[str, Any]) -> ScaleDecision | None:
    """Have as many replicas as a verdict says. None, and nothing done, where somebody changed the number meanwhile.

    A verdict that holds is kept when its reason is another one than the last's.
    """
    row = Deployment.objects.select_for_update().get(pk=deployment.pk)
    if row.desired_replicas != deployment.desired_replicas:
        return None
    if verdict.kind == ScaleDecision.Verdict.HOLD and _said_already(row, verdict):
        return None
    before = row.desired_replicas
    if verdict.after != before:
        row.desired_replicas = deployment.desired_replicas = verdict.after
        row.save(update_fields=["desired_replicas"])
        record(
            AUTOSCALER, "deployment.scale", row, None, desired_replicas=[before, verdict.after], reason=verdict.reason
        )
    return ScaleDecision.objects.create(
        deployment=row,
        verdict=verdict.kind,
        code=verdict.code,
        reason=verdict.reason,
        before=before,
        after=verdict.after,
        signal=signal,
    )


def _said_already(deployment: Deployment, verdict: Verdict) -> bool:
    """Whether the last decision was to hold for the same reason; a warning that comes or goes is news."""
    last = ScaleDecision.objects.filter(deployment=deployment).first()
    if last is None or last.verdict != ScaleDecision.Verdict.HOLD or last.code != verdict.code:
        return False
    return bool(last.signal.get("warning")) == bool(verdict.warning)
