"""Heartbeats of workers in a thread of their own: neither a slow database nor a stopped worker delays another's."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis

from console.fleet import live, probe
from console.fleet.reconcile import Probe

BEAT_S = 0.5


@dataclass
class _Pulse:
    """What is known of one worker. `failing_since` is when the first probe without an answer was sent (monotonic)."""

    url: str
    healthy: bool = True
    reason: str = ""
    failing_since: float | None = None
    answered: bool = False
    asking: bool = False


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

    def watch(self, replica_id: str, url: str) -> None:
        """Ask the worker at `url` from now on; another URL is another worker."""
        with self._lock:
            known = self._pulses.get(replica_id)
            if known is None or known.url != url:
                self._pulses[replica_id] = _Pulse(url)

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

    def _ask(self, replica_id: str, pulse: _Pulse) -> None:
        asked_at = time.monotonic()
        stats: dict[str, Any] | None = None
        try:
            answer = probe.ask(pulse.url)
        except probe.NoAnswer:
            with self._lock:
                pulse.failing_since = pulse.failing_since or asked_at
        else:
            stats = answer.stats
            with self._lock:
                pulse.healthy, pulse.reason = answer.healthy, answer.reason
                pulse.failing_since, pulse.answered = None, True
        finally:
            with self._lock:
                pulse.asking = False
        if stats is not None:
            with contextlib.suppress(redis.RedisError):
                live.publish(self._valkey, replica_id, stats)
