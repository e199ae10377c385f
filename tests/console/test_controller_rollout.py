"""Rollouts, recycling and scaling by the controller, with real processes; and a controller that dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.fleet import rollout_actions
from console.fleet.models import Deployment, Replica, Revision, Rollout, StackCapture, Transition
from console.placement.models import Reservation
from tests.console.fleet_house import House, a_house

pytestmark = pytest.mark.django_db

State = Replica.State


@pytest.fixture
def full_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded_servers: None, db: None) -> Iterator[House]:
    """A card that holds two replicas and no more."""
    with a_house(tmp_path / "workers", monkeypatch, room=2) as made:
        yield made


def two_ready(house: House) -> None:
    Deployment.objects.update(desired_replicas=2)
    house.until_all_ready(2, 1)


def ready_now() -> int:
    return Replica.objects.filter(state=State.READY, wanted=True).count()


def states_of_rollout() -> list[tuple[str, str]]:
    rows = Transition.objects.filter(subject_type="rollout").order_by("id")
    return [(row.old, row.new) for row in rows]


def test_a_new_revision_surges_where_there_is_room(house: House) -> None:
    two_ready(house)
    number = house.revise("")
    fewest = 2

    def done() -> bool:
        nonlocal fewest
        fewest = min(fewest, ready_now())
        return Rollout.objects.filter(state=Rollout.State.DONE).exists()

    house.until(done, 40)
    assert fewest == 2, "one more is verified before one goes"
    house.until_all_ready(2, number)
    rollout = Rollout.objects.get()
    assert (rollout.from_revision, rollout.to_revision, rollout.strategy) == (1, 2, "surge")
    assert states_of_rollout() == [("", "running"), ("running", "done")]
    assert Revision.objects.get(number=2).verified_at is not None
    assert "Revision 2 takes the place of revision 1" in dict(house.history(2)).get(State.DRAINING, "")
    house.until(lambda: len(house.processes()) == 2)


def test_a_new_revision_dips_where_the_card_is_full(full_house: House) -> None:
    house = full_house
    two_ready(house)
    number = house.revise("")
    fewest = 2

    def done() -> bool:
        nonlocal fewest
        fewest = min(fewest, ready_now())
        return Rollout.objects.filter(state=Rollout.State.DONE).exists()

    house.until(done, 40)
    assert fewest == 1, "one at a time"
    house.until_all_ready(2, number)
    assert Rollout.objects.get().strategy == "dip"
    said = Transition.objects.get(subject_type="rollout", details__strategy="dip").reason
    assert said.startswith("One goes before the next comes: ")
    assert "GiB" in said, "the planner's own reason"
    house.until(lambda: len(house.processes()) == 2)
    assert Reservation.objects.filter(state=Reservation.State.RESERVED).count() == 2


@pytest.mark.parametrize("manner", ["crash", "mute"])
def test_a_revision_that_does_not_come_up_is_rolled_back(
    full_house: House, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = full_house
    monkeypatch.setattr("console.fleet.reconcile.BACKOFF_S", (0.01,))
    two_ready(house)
    house.revise(manner)
    house.until(lambda: Rollout.objects.filter(state=Rollout.State.ROLLED_BACK).exists(), 40)
    house.until_all_ready(2, 1)
    deployment = Deployment.objects.get()
    assert (deployment.revision, deployment.parameters) == (1, {}), "what it wants is what runs"
    assert states_of_rollout()[-2:] == [("running", "rolling_back"), ("rolling_back", "rolled_back")]
    why = Transition.objects.get(subject_type="rollout", new="rolling_back").reason
    assert "failed 3 times in a row at revision 2. Back to revision 1" in why
    assert house.revise("") == 3, "numbers go on"
    house.until_all_ready(2, 3)


def test_a_newer_revision_supersedes_a_rollout(house: House) -> None:
    two_ready(house)
    house.revise("loading")
    house.until(lambda: Replica.objects.filter(revision=2, state=State.LOADING).exists())
    number = house.revise("")
    house.until_all_ready(2, number)
    states = Rollout.objects.order_by("to_revision").values_list("to_revision", "state")
    assert list(states) == [(2, "superseded"), (3, "done")]
    house.until(lambda: len(house.processes()) == 2)


@pytest.mark.parametrize("moment", [State.PENDING, State.STARTING, State.LOADING, State.VERIFYING, State.DRAINING])
def test_a_controller_killed_during_a_rollout_is_taken_over_from(house: House, moment: str) -> None:
    """Whatever was under way when it died: the next one converges, with no orphan and no second worker."""
    two_ready(house)
    number = house.revise("")
    if moment == State.DRAINING:
        for replica in Replica.objects.all():
            house.tell(replica, "running", 1)  # a request that goes on
    house.until(lambda: Replica.objects.filter(state=moment).exists())
    house.take_over("second")
    for replica in Replica.objects.all():
        house.tell(replica, "running", 0)
    house.until_all_ready(2, number)
    house.until(lambda: len(house.processes()) == 2)
    pids = {replica.pid for replica in Replica.objects.filter(wanted=True)}
    assert set(house.processes()) == pids
    assert Rollout.objects.get().state == Rollout.State.DONE


def test_a_controller_killed_between_the_row_and_the_start_leaves_nothing_undone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.fleet.reconcile.START_TIMEOUT_S", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(type(house.leader.launcher), "launch", lambda _self, _launch: None)
        house.until_state(State.STARTING)
    house.take_over("second")
    house.until_state(State.FAILED)
    assert house.history()[-1][1].startswith("No worker process within")
    house.until_all_ready(1, 1)
    assert len(house.processes()) == 1


def test_a_worker_that_was_started_but_not_noted_is_never_doubled(house: House) -> None:
    """Its launch came after its controller had lost the lead: the new leader's row is at another epoch."""
    first = house.until_state(State.READY)
    Replica.objects.update(state=State.STOPPED, wanted=False)
    house.until(lambda: not house.alive(first))
    house.until_all_ready(1, 1)
    assert len(house.processes()) == 1


def test_failures_are_remembered_across_leaders(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.fleet.reconcile.BACKOFF_S", (0.01, 0.01, 60.0))
    house.behave("crash")
    house.until(lambda: Replica.objects.filter(failures=3).exists())
    house.take_over("second")
    until = time.monotonic() + 0.5
    house.until(lambda: time.monotonic() > until)
    replica = house.replica()
    assert (replica.failures, replica.epoch, replica.state) == (3, 3, State.FAILED), "it still waits for its minute"


def test_a_drain_waits_for_the_request_that_runs(house: House) -> None:
    two_ready(house)
    second = house.replica(2)
    house.tell(second, "running", 1)
    Deployment.objects.update(desired_replicas=1)
    house.until_state(State.DRAINING, 2)
    until = time.monotonic() + 1
    house.until(lambda: time.monotonic() > until)
    assert house.alive(second)
    assert house.replica(2).state == State.DRAINING
    assert "Its deployment wants 1 instead of 2" in dict(house.history(2))[State.DRAINING]
    house.tell(second, "running", 0)
    house.until_state(State.STOPPED, 2)


def test_a_hung_worker_is_looked_into_before_it_is_killed(house: House) -> None:
    house.behave("sick")
    first = house.until_state(State.HUNG)
    assert house.history()[-1] == ("hung", "No progress: no step for 12 s")
    house.until(lambda: StackCapture.objects.exists())
    found = StackCapture.objects.get()
    assert (found.replica_id, found.epoch, found.reason) == (first.id, 1, "No progress: no step for 12 s")
    assert "serve_forever" in found.text, "what its threads did, before the kill"
    house.until(lambda: not house.alive(first))


def test_the_stack_of_a_stopped_worker_is_read_too(house: House) -> None:
    first = house.until_state(State.READY)
    os.kill(first.pid or 0, signal.SIGSTOP)
    house.until(lambda: StackCapture.objects.exists())
    assert "fake_worker.py" in StackCapture.objects.get().text
    house.until(lambda: house.replica().epoch == 2)
    house.until_all_ready(1, 1)
    assert StackCapture.objects.count() == 1, "it is looked into once"


@pytest.mark.parametrize("taken", [True, False])
def test_a_worker_whose_socket_was_stolen_is_replaced(house: House, taken: bool) -> None:
    first = house.until_state(State.READY)
    path = Path(first.uds)
    path.unlink()
    if taken:
        path.touch()
    house.until_state(State.HUNG)
    word = "was taken: another file is in its place" if taken else "is gone"
    assert house.history()[-1][1] == f"Its socket {path.name} {word}"
    house.until_all_ready(1, 1)
    assert house.replica().uds != first.uds


def test_a_worn_worker_is_replaced_by_a_fresh_one_without_a_gap(house: House) -> None:
    first = house.until_state(State.READY)
    Deployment.objects.update(max_requests=1000)
    house.tell(first, "served", 1000)
    fewest = 1

    def replaced() -> bool:
        nonlocal fewest
        fewest = min(fewest, ready_now())
        return not house.alive(first)

    house.until(replaced)
    assert fewest == 1
    house.until_all_ready(1, 1)
    assert dict(house.history())["draining"] == "Recycled: 1,000 requests served, the limit is 1,000"
    assert "Takes the place of r1: recycled" in house.history(2)[0][1]
    assert not Rollout.objects.exists(), "recycling is no rollout"


def test_what_finds_no_room_waits_with_the_planners_reason_and_starts_when_there_is_some(full_house: House) -> None:
    house = full_house
    two_ready(house)
    Deployment.objects.update(desired_replicas=3)
    house.until(lambda: Replica.objects.filter(ordinal=3).exclude(reason="").exists())
    third = house.replica(3)
    assert (third.state, third.epoch) == (State.PENDING, 0)
    assert "GiB" in third.reason
    assert len(house.history(3)) == 1, "the same refusal is told once"
    Deployment.objects.update(desired_replicas=2)
    house.until_state(State.STOPPED, 3)
    assert ready_now() == 2


def test_a_borrower_is_drained_within_thirty_seconds_when_its_lender_needs_the_memory(house: House) -> None:
    two_ready(house)
    second = house.replica(2)
    rollout_actions.drain(second, "fake r1 uses 9 of the 10 GiB left to it", 30)
    house.until(lambda: dict(house.history(2)).get(State.DRAINING))
    assert house.replica(2).drain_s == 30 or house.replica(2).wanted
    assert dict(house.history(2))[State.DRAINING] == "fake r1 uses 9 of the 10 GiB left to it"
    house.until_all_ready(2, 1)


def test_how_long_a_start_takes_is_learnt(house: House) -> None:
    house.until_state(State.READY)
    replica = house.replica(1)
    assert replica.started_at is not None and replica.ready_at is not None
    took = (replica.ready_at - replica.started_at).total_seconds()
    assert took > 0 and replica.deployment.start_s == pytest.approx(took)
