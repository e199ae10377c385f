"""The controller's decisions, as pure functions: what was desired, what is seen, what time it is → what to do and why.

Every decision carries a reason a person can read; the controller writes it into the Transition.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from console.fleet.models import Replica

State = Replica.State

START_TIMEOUT_S = 30.0  # launch until the worker's process is seen
LOAD_TIMEOUT_S = 600.0  # process until the worker says it is ready; large weights get longer, see load_timeout_s
SLOWEST_LOAD = 50_000_000  # bytes of weights a second, from the slowest disk
SILENT_S = 8.0  # no answer to a probe: stopped or starved, out of rotation
DRAIN_GRACE_S = 1.0  # gateways have heard by then that it takes nobody new, and what was on its way has come
DRAIN_S = 600.0  # for requests that run on; then it is told to end, and cuts them after its own grace
BACKOFF_S = (0.2, 1.0, 4.0, 15.0, 60.0)  # before restart 1, 2, …; the last repeats
_ENDED_AS_ASKED = "exit status 0"  # workers end so at SIGTERM, as when everything is stopped; a crash has another
SETTLED_S = 600.0  # ready for this long: earlier failures are forgiven


class Act(StrEnum):
    """What the controller does besides writing the new state."""

    NOTHING = "nothing"
    LAUNCH = "launch"
    VERIFY = "verify"
    KILL = "kill"
    END = "end"  # drain, then end


@dataclass(frozen=True)
class Probe:
    """The newest answer of a worker to /health. `silent_s` is how long questions have gone unanswered since."""

    healthy: bool
    reason: str
    silent_s: float


@dataclass(frozen=True)
class Seen:
    """What is known of a replica's worker now."""

    present: bool = False  # a worker of the replica's epoch was started
    alive: bool = False
    ready: bool = False  # it wrote its ready file
    exit_reason: str = ""
    log_tail: str = ""
    probe: Probe | None = None
    requests: int | None = None  # that run or wait in it, by what it said last; None where that is not known
    robbed: str = ""  # what became of its socket; empty while it is its own
    weights_bytes: int = 0  # that it loads


@dataclass(frozen=True)
class Decision:
    """The next state, why, and what to do. `state` equal to the present one means that nothing changes."""

    state: str
    reason: str
    act: Act = Act.NOTHING


def decide(
    state: str,
    in_state_s: float,
    failures: int,
    wanted: bool,
    seen: Seen,
    why: str = "Its deployment wants it",
    drain_s: float = DRAIN_S,
) -> Decision:
    """Return what to do with one replica.

    Args:
        state: its state now.
        in_state_s: seconds it has been in that state.
        failures: failed starts and deaths in a row.
        wanted: whether its deployment still wants it.
        seen: what is known of its worker.
        why: it is wanted, or no longer.
        drain_s: how long requests that it has may go on once it is not wanted.
    """
    if state == State.DRAINING:
        return _draining(in_state_s, seen, drain_s)
    if not wanted:
        return _unwanted(state, seen, why)
    if state == State.READY and seen.present and not seen.alive and seen.exit_reason == _ENDED_AS_ASKED:
        return Decision(State.STOPPED, "The worker was asked to end, and did")
    if state in {State.STARTING, State.LOADING, State.VERIFYING, State.READY} and seen.present and not seen.alive:
        return Decision(State.FAILED, _with_tail(f"The worker ended: {seen.exit_reason}", seen.log_tail))
    if state in {State.PENDING, State.STOPPED}:
        return _not_running(state, seen, why)
    return _STEPS[State(state)](in_state_s, failures, seen)


def backoff_s(failures: int) -> float:
    """Seconds to wait before the next start after `failures` failures in a row."""
    if failures <= 0:
        return 0.0
    return BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]


def load_timeout_s(weights_bytes: int) -> float:
    """Seconds that a worker may take until it is ready: nobody is killed for loading what is large."""
    return max(LOAD_TIMEOUT_S, weights_bytes / SLOWEST_LOAD)


def _unwanted(state: str, seen: Seen, why: str) -> Decision:
    if state == State.STOPPED:
        return Decision(state, "", Act.KILL if seen.alive else Act.NOTHING)
    if state == State.HUNG and seen.alive:
        return Decision(state, "", Act.KILL)
    if seen.alive:
        return Decision(State.DRAINING, why)
    return Decision(State.STOPPED, why)


def _not_running(state: str, seen: Seen, why: str) -> Decision:
    """A worker that is still there is one that nobody knows any more: never two."""
    if seen.alive:
        return Decision(state, "", Act.KILL)
    return Decision(State.STARTING, why, Act.LAUNCH)


def _starting(in_state_s: float, _failures: int, seen: Seen) -> Decision:
    if seen.alive:
        return Decision(State.LOADING, "The worker's process is up; it loads the weights")
    if in_state_s > START_TIMEOUT_S:
        return Decision(State.FAILED, f"No worker process within {START_TIMEOUT_S:.0f} s", Act.KILL)
    return Decision(State.STARTING, "")


def _loading(in_state_s: float, _failures: int, seen: Seen) -> Decision:
    if seen.ready:
        return Decision(State.VERIFYING, "The weights are loaded; a test prompt is sent", Act.VERIFY)
    limit_s = load_timeout_s(seen.weights_bytes)
    if in_state_s > limit_s:
        reason = _with_tail(f"Not ready within {limit_s:.0f} s", seen.log_tail)
        return Decision(State.FAILED, reason, Act.KILL)
    return Decision(State.LOADING, "")


def _verifying(_in_state_s: float, _failures: int, _seen: Seen) -> Decision:
    """Only seen by a controller that took over during a verification: do it again."""
    return Decision(State.VERIFYING, "", Act.VERIFY)


def _ready(in_state_s: float, _failures: int, seen: Seen) -> Decision:
    probe = seen.probe
    if seen.robbed:
        return Decision(State.HUNG, seen.robbed, Act.KILL)
    if probe is None or in_state_s < SILENT_S:
        return Decision(State.READY, "")
    if probe.silent_s > SILENT_S:
        return Decision(State.HUNG, f"No answer to a health check for {probe.silent_s:.0f} s", Act.KILL)
    if not probe.healthy:
        return Decision(State.HUNG, f"No progress: {probe.reason}", Act.KILL)
    return Decision(State.READY, "")


def _hung(_in_state_s: float, _failures: int, seen: Seen) -> Decision:
    if seen.alive:
        return Decision(State.HUNG, "", Act.KILL)
    return Decision(State.FAILED, "The hung worker was ended")


def _failed(in_state_s: float, failures: int, seen: Seen) -> Decision:
    if seen.alive:
        return Decision(State.FAILED, "", Act.KILL)
    wait = backoff_s(failures)
    if in_state_s < wait:
        return Decision(State.FAILED, "")
    return Decision(State.STARTING, f"Restart after failure {failures}, {wait:g} s later", Act.LAUNCH)


def _draining(in_state_s: float, seen: Seen, drain_s: float) -> Decision:
    """Gateways send nobody new; it ends once those it has are done. One that cannot say how many is told to end."""
    if not seen.alive:
        return Decision(State.STOPPED, "Drained and ended")
    mute = seen.probe is None or seen.probe.silent_s > SILENT_S
    done = seen.requests == 0 and in_state_s > DRAIN_GRACE_S
    if mute or done or in_state_s > drain_s:
        return Decision(State.DRAINING, "", Act.END)
    return Decision(State.DRAINING, "")


_STEPS = {
    State.STARTING: _starting,
    State.LOADING: _loading,
    State.VERIFYING: _verifying,
    State.READY: _ready,
    State.HUNG: _hung,
    State.FAILED: _failed,
}


def _with_tail(reason: str, tail: str) -> str:
    return f"{reason}. Last line: {tail}" if tail else reason
