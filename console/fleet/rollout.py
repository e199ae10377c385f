"""What becomes of a rollout: done, rolled back, superseded or failed. Pure; fleet.replicas decides its single steps.

A new revision that does not come up FAILURES times in a row, or finds no room even after a replica has gone for it, is
given up, and the newest verified revision before it is what the deployment wants again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from console.fleet.models import Replica, Rollout
from console.fleet.replicas import Group, Have

FAILURES = 3
UNPLACED_S = 60.0  # without room although nobody is leaving any more

State = Rollout.State
Strategy = Rollout.Strategy
OPEN = (State.RUNNING, State.ROLLING_BACK)


@dataclass(frozen=True)
class Going:
    """A rollout under way."""

    state: str
    strategy: str
    to_revision: int
    back_to: int = 0  # once it is rolling back


@dataclass(frozen=True)
class Turn:
    """A rollout's next state and why. `target` is the revision that the deployment should want, where that changes."""

    state: str
    reason: str
    target: int | None = None


def begins(desired: int, revision: int, rows: Sequence[Have]) -> int | None:
    """The revision that a rollout to `revision` would start from; None where there is nothing to roll out."""
    others = [row.revision for row in rows if row.wanted and row.revision != revision]
    if not desired or not others:
        return None
    return max(set(others), key=lambda each: (others.count(each), each))


def strategy_of(going: Going, rows: Sequence[Have], revision: int) -> str:
    """Surge, until one more was refused for want of room."""
    refused = Group(0, revision, tuple(rows)).refused
    return Strategy.DIP if refused or going.strategy == Strategy.DIP else Strategy.SURGE


def turn(going: Going, desired: int, revision: int, rows: Sequence[Have], verified: Collection[int]) -> Turn | None:
    """Return what becomes of a rollout now; None while it goes on.

    Args:
        going: the rollout.
        desired: how many replicas there should be.
        revision: that the deployment wants now.
        rows: all of its replicas.
        verified: revisions that have answered a test prompt before.
    """
    aim = going.to_revision if going.state == State.RUNNING else going.back_to
    if revision != aim:
        return Turn(State.SUPERSEDED, f"Revision {revision} is wanted now")
    group = Group(desired, revision, tuple(rows))
    trouble = _trouble(group)
    if trouble and going.state == State.ROLLING_BACK:
        return Turn(State.FAILED, f"Revision {revision} cannot be served again either: {trouble}")
    if trouble:
        return _give_up(revision, trouble, verified)
    if group.stale_revisions or group.leaving or group.ready < desired or len(group.active) > desired:
        return None
    if not desired:
        return Turn(State.SUPERSEDED, "No replica is wanted any more")
    if going.state == State.ROLLING_BACK:
        return Turn(State.ROLLED_BACK, f"All of {desired} run revision {revision} again")
    return Turn(State.DONE, f"All of {desired} run revision {revision}, verified")


def _give_up(revision: int, trouble: str, verified: Collection[int]) -> Turn:
    earlier = [number for number in verified if number != revision]
    if not earlier:
        return Turn(State.FAILED, f"{trouble}. There is no verified revision to go back to")
    back = max(earlier)
    return Turn(State.ROLLING_BACK, f"{trouble}. Back to revision {back}, the newest that was verified", back)


def _trouble(group: Group) -> str:
    """Why the wanted revision cannot be had; empty while it may."""
    for row in group.fresh:
        if row.failures >= FAILURES and not row.is_ready:
            return f"r{row.ordinal} failed {row.failures} times in a row at revision {group.revision}"
    stuck_s = min((row.in_state_s for row in group.rows if row.state == Replica.State.STOPPED), default=0.0)
    for row in group.refused:
        if not group.leaving and group.ready < group.desired and min(row.in_state_s, stuck_s) > UNPLACED_S:
            return f"r{row.ordinal} found no room at revision {group.revision}, though another one has gone for it"
    return ""
