"""Heartbeats of workers in a thread of their own: neither a slow database nor a stopped worker delays another's."""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis

from console import coordination
from console.fleet import live, probe
from console.fleet.probe import Answer, Where
from console.fleet.progress import Busy, Progress
from console.fleet.reconcile import Probe
from engine.adapters import adapter

log = logging.getLogger(__name__)
BEAT_S = 0.5
STALE_S = 3.0  # what a worker said longer ago means nothing any more
IDLE_CHECK_S = 30.0  # an engine that cannot tell a stuck core from an idle one proves itself this often while idle
OWED_CHECK_S = 1.0  # and so soon where gateways wait for it,
OWED_AGAIN_S = 5.0  # but not more often than this: they may wait for clients that read slowly
OWED_REST_S = 8.0  # the longest between two questions whether they wait, for one that rests


class _Owed:
    """Requests that gateways have in each replica, asked for at most once a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: Mapping[str, int] = {}
        self._at = -math.inf

    def of(self, replica_id: str) -> int:
        """Of one replica; 0 where Valkey does not say. Who comes while another asks takes what was known before."""
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._at >= OWED_CHECK_S:
                    self._at = time.monotonic()
                    self._slots = coordination.read(()).slots
            except coordination.Away:
                self._slots = {}
            finally:
                self._lock.release()
        return self._slots.get(replica_id, 0)


@dataclass
class _Proof:
    """An engine whose counters rest may rest, or be stuck with requests that it never saw: it is asked for a token.

    The counters of a stuck core say "nothing runs", whatever waits before it.
    """

    failure: str = ""  # why the last one was not given
    check: probe.Verification | None = None  # under way
    given: int = 0  # tokens asked for and got: requests that nobody sent
    begun_at: float = -math.inf
    begun_steps: int = 0  # of the engine, then
    owed_since: float | None = None  # gateways wait for it, and it makes no step
    ask_at: float = -math.inf  # whether they do

    def look(self, progress: Progress, where: Where, stats: Mapping[str, Any], owes: Callable[[], int]) -> str | None:
        """Begin or end a check where it is time. Returns why the engine is stuck, or None.

        `owes` tells how many requests gateways wait for there.
        """
        if self.check is not None and not self.check.is_alive():
            self.failure = "" if self.check.seconds is not None else self.check.failure
            self.given += self.check.seconds is not None
            self.check = None
        if progress.stepped or stats.get("asleep"):
            self.owed_since, self.ask_at = None, -math.inf
        if stats["steps"] != self.begun_steps or stats.get("asleep"):
            self.failure = ""  # it waited behind others, who got on
        if self.check is None and not stats.get("asleep") and self._is_due(progress.idle_s, owes):
            timeout_s = max(progress.limit_s - progress.idle_s, progress.limit_s / 2)
            progress.idle_s, self.begun_at, self.begun_steps = 0.0, time.monotonic(), stats["steps"]
            self.check = probe.Verification(where.address, where.served_name, timeout_s)
        return f"idle, but: {self.failure}" if self.failure and not stats["running"] else None

    def _is_due(self, idle_s: float, owes: Callable[[], int]) -> bool:
        if idle_s > IDLE_CHECK_S:
            return True
        now = time.monotonic()
        if idle_s < OWED_CHECK_S or now < self.ask_at or now - self.begun_at < OWED_AGAIN_S:
            return False
        if not owes():
            self.owed_since = None
            self.ask_at = now + min(idle_s, OWED_REST_S)
            return False
        if self.owed_since is None:
            # the first of them may be on its way still, or in a first step that nobody counts yet
            self.owed_since, self.ask_at = now, now + OWED_CHECK_S
            return False
        return True


@dataclass
class _Loan:
    """What a lender may use of its KV pool; it is told whenever it does something else, so also after a restart."""

    uds: str = ""
    share: float = 1.0
    asked: int = 0  # blocks, and what the worker made of them
    agreed: int = 0

    def settle(self, stats: Mapping[str, Any]) -> None:
        """Tell the worker what it may use where that is not what it uses. Raises OSError, HTTPException, ValueError."""
        if not self.uds or not stats.get("num_blocks") or "usable_blocks" not in stats:
            return
        wanted = max(1, int(stats["num_blocks"] * self.share))
        if stats["usable_blocks"] != (self.agreed if wanted == self.asked else wanted):
            self.asked, self.agreed = wanted, probe.limit_pool(self.uds, wanted)


@dataclass
class _Pulse:
    """What is known of one worker. `failing_since` is when the first probe without an answer was sent (monotonic)."""

    where: Where
    progress: Progress | None = None  # of an engine that does not judge itself
    busy: Busy = field(default_factory=lambda: Busy(0))
    healthy: bool = True
    reason: str = ""
    failing_since: float | None = None
    answered: bool = False
    asking: bool = False
    said: dict[str, Any] = field(default_factory=dict)  # its newest stats
    said_at: float = 0.0  # monotonic
    proof: _Proof = field(default_factory=lambda: _Proof())
    loan: _Loan = field(default_factory=lambda: _Loan())


class Heartbeats:
    """Asks every watched worker twice a second and publishes what it says.

    Silence counts from the first question without an answer, never from the last answer: a controller that itself was
    stopped for a while must not mistake its own absence for the worker's.
    """

    def __init__(self) -> None:
        self._pulses: dict[str, _Pulse] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="probe")
        self._valkey = live.client()
        self._owed = _Owed()

    def run(self, stop: threading.Event) -> None:
        """Beat until `stop` is set."""
        while not stop.wait(BEAT_S):
            with self._lock:
                idle = [(key, pulse) for key, pulse in self._pulses.items() if not pulse.asking]
                for _key, pulse in idle:
                    pulse.asking = True
            for key, pulse in idle:
                self._pool.submit(self._ask, key, pulse)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def watch(self, replica_id: str, where: Where | str) -> None:
        """Ask the worker that is there from now on; elsewhere is another worker. A URL alone: the embedded engine."""
        asked = Where(where) if isinstance(where, str) else where
        with self._lock:
            known = self._pulses.get(replica_id)
            if known is None or known.where != asked:
                self._pulses[replica_id] = _pulse(asked)

    def lend(self, replica_id: str, uds: str, share: float) -> None:
        """The worker at that socket may use so much of its KV pool, 0 to 1."""
        with self._lock:
            pulse = self._pulses.get(replica_id)
            if pulse is not None:
                pulse.loan.uds, pulse.loan.share = uds, share

    def lend_nothing(self) -> None:
        """Another controller leads, or may: it tells lenders what they may use. What they were told holds."""
        with self._lock:
            for pulse in self._pulses.values():
                pulse.loan = _Loan()

    def forget(self, replica_id: str) -> None:
        """The worker is gone."""
        with self._lock:
            self._pulses.pop(replica_id, None)

    def heard(self, replica_id: str) -> Probe | None:
        """The newest answer and the length of the silence since; None before the first."""
        with self._lock:
            pulse = self._pulses.get(replica_id)
            if pulse is None or not (pulse.answered or pulse.failing_since):
                return None
            silent_s = 0.0 if pulse.failing_since is None else time.monotonic() - pulse.failing_since
            return Probe(pulse.healthy, pulse.reason, silent_s)

    def said(self) -> dict[str, dict[str, Any]]:
        """The stats of every worker that told them within STALE_S, by the id of its replica."""
        since = time.monotonic() - STALE_S
        with self._lock:
            return {key: pulse.said for key, pulse in self._pulses.items() if pulse.said and pulse.said_at >= since}

    def _ask(self, replica_id: str, pulse: _Pulse) -> None:
        asked_at = time.monotonic()
        stats: dict[str, Any] | None = None
        try:
            answer = probe.ask(pulse.where)
        except probe.NoAnswer:
            with self._lock:
                pulse.failing_since = pulse.failing_since or asked_at
        else:
            stats = self._heard(replica_id, pulse, answer, asked_at)
            self._settle(replica_id, pulse, stats)
        finally:
            with self._lock:
                pulse.asking = False
        if stats:
            with contextlib.suppress(redis.RedisError):
                live.publish(self._valkey, replica_id, stats)

    @staticmethod
    def _settle(replica_id: str, pulse: _Pulse, stats: Mapping[str, Any]) -> None:
        """A lender keeps to its loans. One that cannot be told now is told at the next beat."""
        try:
            pulse.loan.settle(stats)
        except (OSError, http.client.HTTPException, ValueError) as error:
            log.warning("heartbeat: %s cannot be told what it may use of its pool: %s", replica_id, error)

    def _heard(self, replica_id: str, pulse: _Pulse, answer: Answer, now: float) -> dict[str, Any]:
        """Judge an answer; returns the stats to publish."""
        stuck = None
        busy = {"busy": pulse.busy.see(now, answer.stats)} if answer.stats else {}
        if pulse.progress is not None and answer.stats:
            stuck = pulse.progress.see(now, answer.stats)
            owes = partial(self._owed.of, replica_id)
            stuck = stuck or pulse.proof.look(pulse.progress, pulse.where, answer.stats, owes)
        stats = {**answer.stats, **busy, **_without(answer.stats, pulse.proof.given)}
        with self._lock:
            pulse.healthy = answer.healthy and stuck is None
            pulse.reason = answer.reason or stuck or ""
            pulse.failing_since, pulse.answered = None, True
            if stats:
                pulse.said, pulse.said_at = stats, now
        return stats


def _without(stats: dict[str, Any], own: int) -> dict[str, Any]:
    """What finished, without our own test prompts: they end at their two tokens, and wear nothing out."""
    finished = stats.get("requests_finished")
    if not own or not isinstance(finished, dict):
        return {}
    return {"requests_finished": finished | {"length": max(0, finished.get("length", 0) - own)}}


def _pulse(where: Where) -> _Pulse:
    progress = None if adapter(where.engine).judges_itself else Progress(where.max_step_tokens, where.token_s)
    return _Pulse(where, progress, Busy(where.max_num_seqs, where.max_step_tokens))
