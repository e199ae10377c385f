"""Write what becomes of canaries and shadows: their analyses, the rollback, and a Transition for every change."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction

from console.audit.actions import Actor, change, record
from console.fleet.models import RouteTarget, TargetAnalysis, Transition

CONTROLLER = Actor(name="controller")
State = TargetAnalysis.State


@transaction.atomic
def begin(target: RouteTarget, now: datetime) -> TargetAnalysis:
    """Start to judge a target under the weight and role that it has now, without what was seen before."""
    old = TargetAnalysis.objects.filter(target=target).first()
    fresh = {
        "weight": target.weight,
        "role": target.role,
        "since": now,
        "state": State.RUNNING,
        "reason": "",
        "measures": [],
        "looked_at": None,
    }
    analysis, _created = TargetAnalysis.objects.update_or_create(target=target, defaults=fresh)
    _note(target, old.state if old else "", State.RUNNING, f"{target.get_role_display()} with weight {target.weight}")
    return analysis


@transaction.atomic
def conclude(
    analysis: TargetAnalysis, state: str, reason: str, measures: list[dict[str, Any]], now: datetime
) -> TargetAnalysis:
    """Keep the newest figures; a change of state is a Transition too."""
    old = analysis.state
    analysis.state, analysis.reason, analysis.measures, analysis.looked_at = state, reason, measures, now
    analysis.save(update_fields=["state", "reason", "measures", "looked_at"])
    if state != old:
        _note(analysis.target, old, state, reason, measures=measures)
    return analysis


@transaction.atomic
def roll_back(
    analysis: TargetAnalysis, reason: str, measures: list[dict[str, Any]], now: datetime, actor: Actor = CONTROLLER
) -> bool:
    """Take a canary's share away. False, and nothing done, where somebody has given it another one meanwhile."""
    target = RouteTarget.objects.select_for_update().filter(pk=analysis.target_id).first()
    if target is None or (target.weight, target.role) != (analysis.weight, analysis.role):
        return False
    changed = change(target, {"weight": 0})
    record(actor, "route.rollback", target.route, None, deployment=target.deployment.name, reason=reason, **changed)
    analysis.weight = 0  # as the target is now: the next share that it gets begins a new analysis
    analysis.save(update_fields=["weight"])
    conclude(analysis, State.ROLLED_BACK, reason, measures, now)
    return True


def suspend(analysis: TargetAnalysis) -> None:
    """Its target gets no requests of its own any more: when it does again, even by the same weight, all begins anew."""
    analysis.weight = 0
    analysis.save(update_fields=["weight"])


def _note(target: RouteTarget, old: str, new: str, reason: str, **details: Any) -> None:
    Transition.objects.create(
        subject_type="route",
        subject_id=target.route_id,
        subject_label=f"{target.route} → {target.deployment}"[:120],
        old=old,
        new=new,
        reason=reason,
        details={"deployment": str(target.deployment_id), "role": target.role, **details},
    )
