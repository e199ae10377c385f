"""What a rollout's page says: what is done, what goes on, what comes."""

from __future__ import annotations

import pytest
from django.utils import timezone

from console.fleet.models import Deployment, Replica, Rollout
from console.fleet.rollout_steps import steps

State = Replica.State


def replica(ordinal: int, state: str, revision: int, wanted: bool = True, failures: int = 0) -> Replica:
    return Replica(
        ordinal=ordinal, state=state, revision=revision, wanted=wanted, failures=failures, reason="out of luck",
        state_at=timezone.now(),
    )  # fmt: skip


def told(*replicas: Replica, strategy: str = "surge", **more: object) -> list[tuple[str, str]]:
    rollout = Rollout(
        deployment=Deployment(desired_replicas=2), from_revision=1, to_revision=2, strategy=strategy,
        started_at=timezone.now(), **more,
    )  # fmt: skip
    stats = {str(each.id): {"running": each.ordinal} for each in replicas}
    return [(step.title, step.css) for step in steps(rollout, replicas, stats)]


OLD = (replica(1, State.READY, 1), replica(2, State.READY, 1))


def test_one_more_starts_while_the_old_ones_serve() -> None:
    found = told(*OLD, replica(3, State.LOADING, 2))
    assert found == [("Begun", "good"), ("Start", "busy"), ("Verify", "idle"), ("Drain", "idle"), ("Done", "idle")]


def test_without_room_one_goes_first() -> None:
    leaving = replica(1, State.DRAINING, 1, wanted=False)
    found = told(leaving, OLD[1], strategy="dip")
    assert found == [("Begun", "good"), ("Drain", "busy"), ("Start", "idle"), ("Verify", "idle"), ("Done", "idle")]


def test_a_new_one_is_verified_before_it_counts() -> None:
    assert told(*OLD, replica(3, State.VERIFYING, 2))[1:3] == [("Start", "idle"), ("Verify", "busy")]
    new = (replica(3, State.READY, 2), replica(4, State.READY, 2))
    assert told(*new, replica(1, State.STOPPED, 1, wanted=False))[1:4] == [
        ("Start", "good"), ("Verify", "good"), ("Drain", "good"),
    ]  # fmt: skip


def test_one_that_fails_says_why() -> None:
    failing = replica(3, State.FAILED, 2, failures=2)
    rollout = Rollout(
        deployment=Deployment(desired_replicas=2), from_revision=1, to_revision=2, started_at=timezone.now()
    )
    step = steps(rollout, (*OLD, failing), {})[1]
    assert (step.css, step.place, step.text) == ("bad", "now", "r3: out of luck")
    failing.state = State.LOADING
    step = steps(rollout, (*OLD, failing), {})[1]
    assert (step.css, step.text) == ("busy", "0 of 2 started. r3: Loading, after 2 failures")


def test_going_back_aims_at_the_earlier_revision() -> None:
    found = told(*OLD, replica(3, State.FAILED, 2, wanted=False, failures=3), state="rolling_back", back_to=1)
    assert found[0] == ("Back to revision 1", "good")
    assert found[1:4] == [("Start", "good"), ("Verify", "good"), ("Drain", "busy")]


@pytest.mark.parametrize("state", ["done", "rolled_back", "superseded", "failed"])
def test_once_it_is_over_its_lanes_say_enough(state: str) -> None:
    assert told(*OLD, state=state) == []
