"""External endpoints as replicas without a worker: what their address check means for them, and the checks themselves.

The decision is pure, as in fleet.reconcile. A check resolves a name, which may take the system's resolver half a
minute: it runs in a thread that nothing waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from console.base import egress
from console.base.egress import Allow, EgressRefused, Resolve, Unresolved
from console.fleet.models import Endpoint, Replica
from console.fleet.reconcile import backoff_s

State = Replica.State

RECHECK_S = 60.0
"""How often a name is resolved again: the addresses of hosted APIs move within minutes."""


@dataclass(frozen=True)
class Checked:
    """What one check found: the addresses to connect to, or why not; `refused` means that waiting will not help."""

    addresses: tuple[str, ...] = ()
    reason: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Step:
    """The next state and why, with the columns that change; `check` asks for a check, unless one is under way."""

    state: str
    reason: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    check: bool = False


def facts_of(endpoint: Endpoint, addresses: tuple[str, ...]) -> dict[str, Any]:
    """What gateways need to reach it, as the replica's facts."""
    return {
        "url": endpoint.base_url,
        "model": endpoint.served_name,
        "max_num_seqs": endpoint.max_num_seqs,
        "addresses": list(addresses),
    }


def decide(
    replica: Replica, endpoint: Endpoint, unchecked_s: float, failures: int, wanted: bool, found: Checked | None
) -> Step:
    """Return what to do with the replica of an external endpoint, `found` being a check that just ended."""
    state = replica.state
    if not wanted:
        return Step(state) if state == State.STOPPED else Step(State.STOPPED, "Its deployment wants fewer replicas")
    if found is not None:
        return _after(replica, endpoint, found)
    if state in {State.PENDING, State.STOPPED}:
        return Step(State.VERIFYING, "Its address is checked", check=True)
    if state == State.READY:
        return _ready(replica, endpoint, unchecked_s)
    if state == State.FAILED:
        return Step(state, check=unchecked_s >= backoff_s(failures))
    return Step(state, check=True)


def _ready(replica: Replica, endpoint: Endpoint, unchecked_s: float) -> Step:
    facts = facts_of(endpoint, tuple(replica.facts.get("addresses", ())))
    if any(facts[name] != replica.facts.get(name) for name in ("url", "model")):
        return Step(State.VERIFYING, "Its endpoint changed; its address is checked", check=True)
    if facts != replica.facts:
        return Step(
            State.READY, f"It takes {endpoint.max_num_seqs or 'any number of'} requests at once", {"facts": facts}
        )
    return Step(State.READY, check=unchecked_s >= RECHECK_S)


def _after(replica: Replica, endpoint: Endpoint, found: Checked) -> Step:
    """A name that cannot be resolved now leaves a ready endpoint as it is: the addresses it had still stand."""
    if not found.addresses:
        if replica.state == State.READY and not found.refused:
            return Step(State.READY)
        if replica.state == State.FAILED and found.reason == replica.reason:
            return Step(State.FAILED)
        return Step(State.FAILED, found.reason, {"ready_at": None})
    facts = facts_of(endpoint, found.addresses)
    if replica.state == State.READY and facts == replica.facts:
        return Step(State.READY)
    reason = f"{endpoint.base_url} may be called at {', '.join(found.addresses)}"
    return Step(State.READY, reason, {"facts": facts, "epoch": replica.epoch + 1, "device": "external"})


class Checks:
    """Address checks under way and ended, one per replica at a time."""

    def __init__(self, allow: Allow, resolve: Resolve = egress.resolve_by_system) -> None:
        self._allow = allow
        self._resolve = resolve
        self._running: dict[UUID, _Check] = {}
        self._ended_at: dict[UUID, float] = {}  # monotonic

    def begin(self, replica_id: UUID, url: str) -> None:
        """Start a check, unless one is under way."""
        if replica_id not in self._running:
            self._running[replica_id] = _Check(url, self._allow, self._resolve)

    def ended(self, replica_id: UUID, url: str) -> Checked | None:
        """The result of a check of this URL that has ended since the last call; one of an older URL counts as none."""
        check = self._running.get(replica_id)
        if check is None or check.found is None:
            return None
        del self._running[replica_id]
        self._ended_at[replica_id] = time.monotonic()
        return check.found if check.url == url else None

    def age_s(self, replica_id: UUID) -> float:
        """Seconds since the last check ended; very many where there was none."""
        ended = self._ended_at.get(replica_id)
        return float("inf") if ended is None else time.monotonic() - ended


class _Check(threading.Thread):
    """One check, in a thread that no exit waits for."""

    def __init__(self, url: str, allow: Allow, resolve: Resolve) -> None:
        super().__init__(name="egress", daemon=True)
        self.url = url
        self.found: Checked | None = None
        self._allow = allow
        self._resolve = resolve
        self.start()

    def run(self) -> None:
        """Check once; the outcome stands in `found`."""
        try:
            self.found = Checked(egress.check(self.url, self._allow, self._resolve).addresses)
        except EgressRefused as error:
            self.found = Checked(reason=str(error), refused=True)
        except Unresolved as error:
            self.found = Checked(reason=str(error))
