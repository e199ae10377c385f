"""The controller's decisions: every path of a replica, and what holds for any of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from console.fleet import reconcile
from console.fleet.models import Replica
from console.fleet.reconcile import Act, Probe, Seen, decide

State = Replica.State
ALIVE = Seen(present=True, alive=True)
DEAD = Seen(present=True, exit_reason="signal 9 (SIGKILL)", log_tail="loading 40 %")
PROBES = st.none() | st.builds(
    Probe,
    healthy=st.booleans(),
    reason=st.sampled_from(["", "no step for 12 s"]),
    silent_s=st.floats(0, 1000),
)
SEEN = st.builds(
    Seen, present=st.booleans(), alive=st.booleans(), ready=st.booleans(), exit_reason=st.just("exit status 1"),
    log_tail=st.sampled_from(["", "boom"]), probe=PROBES, requests=st.none() | st.integers(0, 2),
)  # fmt: skip


def test_a_replica_goes_from_wanted_to_ready_in_order() -> None:
    assert decide(State.PENDING, 0, 0, True, Seen()).act is Act.LAUNCH
    assert decide(State.STARTING, 1, 0, True, ALIVE).state == State.LOADING
    assert decide(State.LOADING, 1, 0, True, ALIVE).state == State.LOADING
    verifying = decide(State.LOADING, 1, 0, True, replace(ALIVE, ready=True))
    assert (verifying.state, verifying.act) == (State.VERIFYING, Act.VERIFY)


def test_what_is_large_may_load_for_longer() -> None:
    small, large = replace(ALIVE, weights_bytes=10**9), replace(ALIVE, weights_bytes=140 * 10**9)
    assert decide(State.LOADING, reconcile.LOAD_TIMEOUT_S + 1, 0, True, small).act is Act.KILL
    assert decide(State.LOADING, reconcile.LOAD_TIMEOUT_S + 1, 0, True, large).act is Act.NOTHING
    assert decide(State.LOADING, 2801, 0, True, large).reason == "Not ready within 2800 s"


def test_a_death_says_how_and_the_last_line() -> None:
    decision = decide(State.LOADING, 1, 0, True, DEAD)
    assert decision.state == State.FAILED
    assert decision.reason == "The worker ended: signal 9 (SIGKILL). Last line: loading 40 %"


def test_a_worker_that_ended_as_it_was_asked_did_not_fail() -> None:
    ended = replace(DEAD, exit_reason="exit status 0", log_tail="")
    assert decide(State.READY, 100, 0, True, ended).state == State.STOPPED
    assert decide(State.LOADING, 1, 0, True, ended).state == State.FAILED
    assert decide(State.STOPPED, 0, 0, True, ended).act is Act.LAUNCH


def test_a_silent_worker_leaves_rotation_within_ten_seconds() -> None:
    silent = replace(ALIVE, probe=Probe(True, "", reconcile.SILENT_S + 0.1))
    decision = decide(State.READY, 100, 0, True, silent)
    assert (decision.state, decision.act) == (State.HUNG, Act.KILL)
    assert reconcile.SILENT_S < 10


def test_no_progress_is_hung_with_the_workers_own_reason() -> None:
    stuck = replace(ALIVE, probe=Probe(False, "3 running and no step for 12 s", 0.2))
    decision = decide(State.READY, 100, 0, True, stuck)
    assert decision.state == State.HUNG
    assert "no step for 12 s" in decision.reason


def test_a_slow_but_answering_worker_stays() -> None:
    slow = replace(ALIVE, probe=Probe(True, "", 4.0))
    assert decide(State.READY, 100, 0, True, slow).state == State.READY


def test_restarts_back_off_and_start_at_once_the_first_time() -> None:
    waits = [reconcile.backoff_s(failures) for failures in range(1, 8)]
    assert waits == sorted(waits)
    assert waits[0] < 1
    assert decide(State.FAILED, 0.0, 3, True, Seen()).act is Act.NOTHING
    assert decide(State.FAILED, 5.0, 3, True, Seen()).act is Act.LAUNCH


def test_a_replica_no_longer_wanted_is_drained_first() -> None:
    assert decide(State.READY, 9, 0, False, ALIVE).state == State.DRAINING
    assert decide(State.DRAINING, 9, 0, False, ALIVE).act is Act.END
    assert decide(State.DRAINING, 9, 0, False, DEAD).state == State.STOPPED


def test_a_drain_waits_for_the_requests_it_has_and_not_for_ever() -> None:
    heard = replace(ALIVE, probe=Probe(True, "", 0.0))
    two, none = replace(heard, requests=2), replace(heard, requests=0)
    late = replace(heard, requests=None, probe=Probe(True, "", 4.0))
    assert decide(State.DRAINING, 9, 0, False, two).act is Act.NOTHING
    assert decide(State.DRAINING, reconcile.DRAIN_S + 1, 0, False, two).act is Act.END
    assert decide(State.DRAINING, 31, 0, False, two, drain_s=30).act is Act.END
    assert decide(State.DRAINING, 9, 0, False, late).act is Act.NOTHING, "a late answer is no reason to cut anybody"
    assert decide(State.DRAINING, 0.5, 0, False, none).act is Act.NOTHING, "gateways may still be sending"
    assert decide(State.DRAINING, 3, 0, False, none).act is Act.END
    mute = replace(two, probe=Probe(True, "", reconcile.SILENT_S + 1))
    assert decide(State.DRAINING, 3, 0, False, mute).act is Act.END


def test_a_socket_that_is_not_its_own_takes_a_worker_out_of_rotation() -> None:
    robbed = replace(ALIVE, robbed="Its socket is gone", probe=Probe(True, "", 0))
    decision = decide(State.READY, 1, 0, True, robbed)
    assert (decision.state, decision.reason, decision.act) == (State.HUNG, "Its socket is gone", Act.KILL)


def test_a_hung_worker_that_is_not_wanted_any_more_is_ended_all_the_same() -> None:
    assert decide(State.HUNG, 1, 0, False, ALIVE).act is Act.KILL
    assert decide(State.HUNG, 1, 0, False, DEAD).state == State.STOPPED


@given(
    state=st.sampled_from(list(State)),
    in_state=st.floats(0, 1e4),
    failures=st.integers(0, 20),
    wanted=st.booleans(),
    seen=SEEN,
)
def test_every_change_has_a_reason_and_no_second_worker_is_started(
    state: str, in_state: float, failures: int, wanted: bool, seen: Seen
) -> None:
    decision = decide(state, in_state, failures, wanted, seen)
    if decision.state != state:
        assert decision.reason
    if decision.act is Act.LAUNCH:
        assert wanted
        assert not seen.alive
    if not wanted:
        assert decision.state in {State.DRAINING, State.STOPPED} or decision.act is Act.KILL
    if state == State.STOPPED and seen.alive:
        assert decision.act is Act.KILL, "whoever thinks that it is stopped must not leave it running"
