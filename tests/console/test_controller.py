"""The controller against real worker processes: it starts, verifies, replaces, adopts and drains them, and survives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import OperationalError

from console.audit.actions import COMMAND_LINE
from console.base.egress import parse_allow
from console.fleet import controller as module
from console.fleet import live, reconcile
from console.fleet.controller import Controller
from console.fleet.endpoint_actions import add_endpoint
from console.fleet.external import Checks
from console.fleet.models import ControllerLease, Deployment, Replica, Transition
from console.fleet.worker_logs import last_line
from console.fleet.workers import Workers
from engine.launchers.base import Launch
from engine.launchers.local import LocalLauncher
from tests.console.fleet_house import House

pytestmark = pytest.mark.django_db

State = Replica.State


def test_a_wanted_replica_becomes_ready_through_every_state_with_a_reason(house: House) -> None:
    replica = house.until_state(State.READY)
    assert [state for state, _reason in house.history()] == ["starting", "loading", "verifying", "ready"]
    assert all(reason for _state, reason in house.history())
    assert house.alive(replica)
    assert replica.facts["model"] == "fake"
    assert replica.metrics_url.endswith("/metrics")
    house.until(lambda: live.read([str(replica.id)]))


def test_a_killed_worker_is_replaced_and_the_signal_is_named(house: House) -> None:
    first = house.until_state(State.READY)
    os.kill(first.pid or 0, signal.SIGKILL)
    house.until_state(State.FAILED)
    assert house.history()[-1] == ("failed", "The worker ended: signal 9 (SIGKILL)")
    second = house.until_state(State.READY)
    assert second.pid != first.pid
    assert (second.epoch, second.restarts) == (2, 1)


def test_what_a_killed_worker_left_beside_its_socket_is_removed_with_it(house: House) -> None:
    first = house.until_state(State.READY)
    folder = Path(first.uds).with_suffix("")
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "left-over").touch()
    os.kill(first.pid or 0, signal.SIGKILL)
    house.until_state(State.FAILED)
    second = house.until_state(State.READY)
    assert not folder.exists() and Path(second.uds).with_suffix("").is_dir()


def test_the_last_line_is_a_whole_one_and_none_of_the_engines_records(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text('{"event": "ready", "n": 1}\n' * 400)
    assert last_line(log) == ""
    log.write_text('out of luck\n{"event": "stopped"}\n')
    assert last_line(log) == "out of luck"


def test_a_stopped_worker_is_hung_and_replaced(house: House) -> None:
    first = house.until_state(State.READY)
    os.kill(first.pid or 0, signal.SIGSTOP)
    house.until_state(State.HUNG)
    assert "No answer to a health check" in house.history()[-1][1]
    assert house.until_state(State.READY).pid != first.pid
    assert not house.alive(first)


def test_a_worker_that_ends_at_once_fails_with_its_last_line(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "BACKOFF_S", (0.1, 0.2, 0.3))
    house.behave("crash")
    house.until_state(State.FAILED)
    assert house.history()[-1][1] == "The worker ended: exit status 3. Last line: out of luck"
    house.until(lambda: house.replica().epoch == 3)
    assert [reason for state, reason in house.history() if state == "starting"][1:] == [
        "Restart after failure 1, 0.1 s later",
        "Restart after failure 2, 0.2 s later",
    ]
    house.behave("")
    house.until_state(State.READY)


def test_a_worker_that_never_gets_ready_is_ended(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "LOAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(reconcile, "SLOWEST_LOAD", 1 << 60)
    house.behave("loading")
    first = house.until_state(State.FAILED)
    assert house.history()[-1][1].startswith("Not ready within 0 s")
    assert not house.alive(first)


def test_a_worker_that_fails_its_test_prompt_is_never_ready(house: House) -> None:
    house.behave("mute")
    first = house.until_state(State.FAILED)
    assert house.history()[-1][1] == "The test prompt got status 500: no voice"
    assert not house.alive(first)
    assert "ready" not in dict(house.history())


def test_parameters_that_cannot_be_used_are_said(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real adapter
    house.behave("crash")
    house.until_state(State.FAILED)
    assert house.history()[-1][1].startswith("as is not a parameter of the embedded engine")


def test_a_process_that_cannot_be_started_is_a_failure_and_not_the_end(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: LocalLauncher, _launch: Launch) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalLauncher, "launch", refuse)
        house.until_state(State.FAILED)
    assert "No space left on device" in house.history()[-1][1]
    house.until_state(State.READY)


def test_a_new_controller_adopts_the_worker_that_runs(house: House) -> None:
    first = house.until_state(State.READY)
    count = len(house.history())
    house.take_over("second")
    house.until(lambda: live.read([str(first.id)]) and house.leader.lease.epoch == 2)
    assert house.replica().pid == first.pid
    assert house.alive(first)
    assert len(house.history()) == count


def test_a_controller_that_takes_over_during_a_verification_does_it_again(house: House) -> None:
    house.behave("slow")
    first = house.until_state(State.VERIFYING)
    house.take_over("second")
    house.until(lambda: house.leader.workers._verifications)
    assert house.replica().state == State.VERIFYING
    os.kill(first.pid or 0, signal.SIGKILL)
    house.behave("")
    house.until_state(State.READY)


def test_a_worker_of_another_epoch_is_ended(house: House) -> None:
    first = house.until_state(State.READY)
    Replica.objects.update(epoch=5, state=State.PENDING)
    house.until(lambda: house.replica().epoch == 6)
    assert not house.alive(first)
    house.until_state(State.READY)


def test_a_worker_whose_replica_was_deleted_is_ended(house: House) -> None:
    first = house.until_state(State.READY)
    Deployment.objects.all().delete()
    house.until(lambda: not house.alive(first))


def test_a_second_controller_does_nothing_until_the_lease_has_ended(house: House) -> None:
    house.until_state(State.READY)
    second = house.controller("second")
    Deployment.objects.update(desired_replicas=2)
    for _ in range(5):
        second.tick()
    assert second.lease.epoch == 0
    assert Replica.objects.count() == 1
    ControllerLease.objects.update(expires_at="2000-01-01T00:00Z")
    second.tick()
    assert second.lease.epoch == 2
    house.leader.lease.doubt()  # the first asks again in time
    Replica.objects.filter(ordinal=2).delete()
    house.leader.tick()
    assert Replica.objects.count() == 1, "who lost the lease does nothing"
    house.leader = second
    house.until_state(State.READY, 2)


def test_who_cannot_know_whether_it_leads_tells_no_lender_either(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.until_state(State.READY)
    replica, stop = house.replica(), threading.Event()

    def fail() -> None:
        stop.set()
        raise OperationalError("the connection is closed")

    house.leader.heartbeats.lend(str(replica.id), replica.uds, 0.5)
    monkeypatch.setattr(house.leader, "tick", fail)
    for work in (house.leader.heartbeats, house.leader.devices):  # the house runs them already
        monkeypatch.setattr(work, "run", lambda _stop: None)
    house.leader.run(stop)
    assert house.leader.heartbeats._pulses[str(replica.id)].loan.uds == ""


def test_who_does_not_lead_tells_no_lender_what_it_may_use(house: House) -> None:
    """The other controller does, and two that disagree would wipe a lender's prefixes twice a second."""
    house.until_state(State.READY)
    replica, first = house.replica(), house.leader
    loan = first.heartbeats._pulses[str(replica.id)].loan
    first.heartbeats.lend(str(replica.id), replica.uds, 0.5)
    assert (loan.uds, loan.share) == (replica.uds, 0.5)
    first.devices.pools = {replica.id: 0.5}
    house.take_over("second")
    house.until(lambda: house.leader.lease.epoch == 2)
    first.lease.doubt()
    first.tick()
    assert first.heartbeats._pulses[str(replica.id)].loan.uds == "" and not first.devices.pools


def test_fewer_replicas_drain_while_the_others_are_looked_after(house: House) -> None:
    Deployment.objects.update(desired_replicas=2)
    house.until_state(State.READY, 1)
    house.until_state(State.READY, 2)
    first, second = house.replica(1), house.replica(2)
    os.kill(second.pid or 0, signal.SIGSTOP)  # its drain takes for ever
    Deployment.objects.update(desired_replicas=1)
    house.until_state(State.DRAINING, 2)
    house.leader.tick()
    os.kill(first.pid or 0, signal.SIGKILL)
    house.until(lambda: house.replica(1).epoch == 2)
    house.until_state(State.READY, 1)
    assert house.replica(2).state == State.DRAINING
    os.kill(second.pid or 0, signal.SIGCONT)
    house.until_state(State.STOPPED, 2)
    assert not house.alive(second)
    Deployment.objects.update(desired_replicas=2)
    assert house.until_state(State.READY, 2).epoch == 2


def test_one_replica_that_cannot_be_handled_does_not_stop_the_others(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    Deployment.objects.update(desired_replicas=2)
    step = Workers.step

    def trip(self: Workers, replica: Replica, may_act: Callable[[], bool]) -> None:
        if replica.ordinal == 1:
            raise RuntimeError("boom")
        step(self, replica, may_act)

    monkeypatch.setattr(Workers, "step", trip)
    house.until_state(State.READY, 2)
    assert house.replica(1).state == State.PENDING


def test_a_database_error_is_waited_out(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    class Once(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return self.is_set()

    stop = Once()

    def tick(_self: Controller) -> None:
        looks.append(1)
        if len(looks) == 1:
            raise OperationalError("")  # a lost connection can say nothing at all
        stop.set()

    monkeypatch.setattr(Controller, "tick", tick)
    monkeypatch.setattr(module, "close_old_connections", lambda: None)
    house.leader.heartbeats.run = lambda _stop: None  # type: ignore[method-assign]
    house.leader.run(stop)
    assert len(looks) == 2


def test_an_external_endpoint_is_ready_without_a_worker_and_leaves_when_its_address_is_refused(house: House) -> None:
    found = ["127.0.0.1"]
    house.leader._checks = Checks(parse_allow("127.0.0.1"), lambda _host, _port: list(found))
    hosted = add_endpoint(COMMAND_LINE, "hosted", {"base_url": "http://x.example.com:9000", "served_name": "big"})

    def is_in(state: str) -> bool:
        return Replica.objects.filter(deployment=hosted, state=state).exists()

    house.until(lambda: is_in(State.READY))
    replica = Replica.objects.get(deployment=hosted)
    assert (replica.epoch, replica.pid, replica.facts["addresses"]) == (1, None, ["127.0.0.1"])
    assert replica.ready_at is not None
    assert str(replica.id) not in house.leader.launcher.known()
    found[:] = ["10.0.0.1"]  # the name moves into our own network
    house.leader._checks._ended_at.clear()
    house.until(lambda: is_in(State.FAILED))
    found[:] = ["127.0.0.1"]
    house.leader._checks._ended_at.clear()
    house.until(lambda: is_in(State.READY))
    Deployment.objects.filter(pk=hosted.pk).update(desired_replicas=0)
    house.until(lambda: is_in(State.STOPPED))
    rows = Transition.objects.filter(subject_label="hosted r1").order_by("id")
    assert [row.new for row in rows] == ["verifying", "ready", "failed", "ready", "stopped"]
    assert "10.0.0.1, a private address" in rows[2].reason
