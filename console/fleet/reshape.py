"""Makes a deployment's rows match what is wanted: one look at its rollout, and the next steps of fleet.replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from console.fleet import rollout_actions
from console.fleet.models import Deployment, Replica, Revision, Rollout
from console.fleet.replicas import Drain, Have, plan
from console.fleet.rollout import OPEN, Going, begins, strategy_of, turn


@dataclass(frozen=True)
class Known:
    """What rows do not say of a replica: how long it is in its state, why it should be replaced, why it has no room."""

    in_state_s: float = 0.0
    tired: str = ""
    refused: str = ""


def reshape(
    deployment: Deployment, replicas: Sequence[Replica], going: Rollout | None, known: Mapping[UUID, Known]
) -> list[Replica]:
    """Write who is wanted from now on. Returns the deployment's replicas, new ones included, by number.

    `going` is the rollout that is under way.
    """
    rows = {replica.ordinal: replica for replica in replicas}
    haves = [_have(replica, known.get(replica.id, Known())) for replica in replicas]
    if going is not None:
        going.deployment = deployment
        going = _advance(going, deployment, haves, [each.refused for each in known.values() if each.refused])
    if going is None:
        origin = begins(deployment.desired_replicas, deployment.revision, haves)
        going = None if origin is None else rollout_actions.begin(deployment, origin)
    dips = going is not None and going.strategy == Rollout.Strategy.DIP
    for step in plan(deployment.desired_replicas, deployment.revision, haves, dips):
        if isinstance(step, Drain):
            rollout_actions.drain(rows[step.ordinal], step.why)
        else:
            rows[step.ordinal] = rollout_actions.start(deployment, step)
    return [rows[ordinal] for ordinal in sorted(rows)]


def _advance(rollout: Rollout, deployment: Deployment, haves: list[Have], refusals: list[str]) -> Rollout | None:
    """The rollout where it goes on, None where it has ended."""
    going = Going(rollout.state, rollout.strategy, rollout.to_revision, rollout.back_to or 0)
    if strategy_of(going, haves, deployment.revision) != rollout.strategy:
        rollout_actions.dip(rollout, refusals[0] if refusals else "there is no room for one more")
    found = turn(going, deployment.desired_replicas, deployment.revision, haves, _verified(deployment))
    if found is None:
        return rollout
    rollout_actions.go_on(rollout, found)
    return rollout if rollout.state in OPEN else None


def _verified(deployment: Deployment) -> set[int]:
    rows = Revision.objects.filter(deployment=deployment, verified_at__isnull=False)
    return set(rows.values_list("number", flat=True))


def _have(replica: Replica, known: Known) -> Have:
    return Have(
        ordinal=replica.ordinal,
        revision=replica.revision,
        state=replica.state,
        wanted=replica.wanted,
        tired=known.tired,
        refused=bool(known.refused),
        failures=replica.failures,
        in_state_s=known.in_state_s,
    )
