"""Writes of rollouts: whom a deployment wants, and what becomes of a revision that replaces another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.utils import timezone

from console.fleet.models import Deployment, Replica, Revision, Rollout, Transition
from console.fleet.replicas import Start
from console.fleet.revisions import CONFIG, first_revision
from console.fleet.rollout import Turn

State = Rollout.State


def start(deployment: Deployment, step: Start) -> Replica:
    """Want a replica: its row is made, or one that was stopped is used again."""
    fresh: Mapping[str, Any] = {
        "revision": step.revision,
        "wanted": True,
        "why": step.why,
        "drain_s": None,
        "failures": 0,
        "settled_rss_bytes": None,
    }
    replica, _made = Replica.objects.update_or_create(
        deployment=deployment, ordinal=step.ordinal, defaults=fresh, create_defaults=fresh
    )
    replica.deployment = deployment
    return replica


def drain(replica: Replica, why: str, drain_s: int | None = None) -> None:
    """Want a replica no longer: it takes nobody new, ends what it has within `drain_s`, and stops."""
    replica.wanted, replica.why, replica.drain_s = False, why, drain_s
    replica.save(update_fields=["wanted", "why", "drain_s"])


@transaction.atomic
def begin(deployment: Deployment, from_revision: int) -> Rollout:
    """A deployment wants another revision than what runs: that is a rollout from now on."""
    rollout = Rollout.objects.create(
        deployment=deployment,
        from_revision=from_revision,
        to_revision=deployment.revision,
        reason=f"Revision {deployment.revision} is wanted",
    )
    _note(rollout, "", rollout.state, rollout.reason)
    return rollout


@transaction.atomic
def dip(rollout: Rollout, reason: str) -> None:
    """There is no room for one more: from now on one goes before the next comes."""
    rollout.strategy, rollout.reason = Rollout.Strategy.DIP, reason
    rollout.save(update_fields=["strategy", "reason"])
    _note(rollout, rollout.state, rollout.state, f"One goes before the next comes: {reason}", strategy="dip")


@transaction.atomic
def go_on(rollout: Rollout, turn: Turn) -> None:
    """Write what becomes of a rollout; one that rolls back makes its deployment want the earlier revision again."""
    old = rollout.state
    rollout.state, rollout.reason = turn.state, turn.reason
    if turn.state == State.ROLLING_BACK:
        assert turn.target is not None
        rollout.back_to = turn.target
        _restore(rollout.deployment, rollout.to_revision, turn.target)
    else:
        rollout.ended_at = timezone.now()
    rollout.save(update_fields=["state", "reason", "back_to", "ended_at"])
    _note(rollout, old, rollout.state, rollout.reason)


def verified(deployment: Deployment, number: int) -> None:
    """A replica at that revision answered a test prompt: it is one that can be gone back to."""
    if number == deployment.revision:
        first_revision(deployment, by="")
    Revision.objects.filter(deployment=deployment, number=number, verified_at=None).update(verified_at=timezone.now())


def _restore(deployment: Deployment, given_up: int, number: int) -> None:
    """Want an earlier revision again, under its own number; who changed the deployment meanwhile is left alone."""
    row = Deployment.objects.select_for_update().get(pk=deployment.pk)
    if row.revision != given_up:
        return
    config = Revision.objects.get(deployment=row, number=number).config
    for target in (row, deployment):
        for name in CONFIG:
            setattr(target, name, config[name])
        target.revision = number
    row.save(update_fields=[*(name.removesuffix("_id") for name in CONFIG), "revision"])


def _note(rollout: Rollout, old: str, new: str, reason: str, **details: Any) -> None:
    Transition.objects.create(
        subject_type="rollout",
        subject_id=rollout.id,
        subject_label=str(rollout)[:120],
        old=old,
        new=new,
        reason=reason,
        details={"deployment": str(rollout.deployment_id), **details},
    )
