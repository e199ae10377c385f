"""From a worker's process to one that takes requests: whether it says that it is ready, and whether it is reached."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from console.fleet import probe
from console.fleet.models import Replica
from console.fleet.probe import Where
from console.fleet.revisions import config_at
from engine.adapters import adapter

ASK_S = 0.5  # an engine that writes no ready file is asked so often


class _Asking(threading.Thread):
    """One question to a worker that loads, which may not answer for seconds."""

    def __init__(self, engine: str, uds: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(name="ready", daemon=True)
        self.began = time.monotonic()
        self.facts: dict[str, Any] | None = None
        self._asked = (engine, uds, parameters)
        self.start()

    def run(self) -> None:
        """Ask once."""
        self.facts = probe.ready(*self._asked)


class Readiness:
    """Whether workers are loaded: by the file that they write, or by asking those that write none."""

    def __init__(self) -> None:
        self._asking: dict[tuple[UUID, int], _Asking] = {}

    def facts(self, replica: Replica, told: Mapping[str, Any]) -> dict[str, Any]:
        """A worker's facts once it is ready, empty before. `told` is its ready file."""
        engine = replica.deployment.engine
        if adapter(engine).writes_ready_file or told:
            return dict(told)
        key = (replica.id, replica.epoch)
        if replica.facts:  # of this launch: they were asked for already
            self._asking.pop(key, None)
            return dict(replica.facts)
        asking = self._asking.get(key)
        if asking is not None and asking.facts:  # kept until the row has them: who asks twice gets them twice
            return dict(asking.facts)
        if asking is None or (not asking.is_alive() and time.monotonic() - asking.began >= ASK_S):
            self._asking = {each: other for each, other in self._asking.items() if each[0] != replica.id}
            self._asking[key] = _Asking(engine, replica.uds, parameters_of(replica))
        return {}


def parameters_of(replica: Replica) -> dict[str, Any]:
    """What the engine of a replica's revision was told."""
    return dict(config_at(replica.deployment, replica.revision).get("parameters") or {})


def address_of(replica: Replica, facts: Mapping[str, Any]) -> Where:
    """Where a worker is asked how it is: its own address on loopback, or the socket that it serves on."""
    return Where(
        address=str(facts.get("introspection_url") or replica.uds),
        engine=replica.deployment.engine,
        served_name=str(facts.get("model", "")),
        max_num_seqs=int(facts.get("max_num_seqs") or 0),
        max_step_tokens=int(facts.get("max_num_batched_tokens") or 0),
        token_s=float(facts.get("token_s") or 0.0),
    )


def socket_identity(uds: str) -> list[int]:
    """What tells a socket's file from another at the same path; empty where there is none."""
    try:
        found = Path(uds).stat()
    except OSError:
        return []
    return [found.st_dev, found.st_ino]


def robbed(replica: Replica) -> str:
    """Why requests to a ready worker's socket would reach somebody else, or nobody; empty while they reach it."""
    known = replica.facts.get("socket")
    if not known or not replica.uds:
        return ""
    now = socket_identity(replica.uds)
    if now == known:
        return ""
    name = Path(replica.uds).name
    return f"Its socket {name} is gone" if not now else f"Its socket {name} was taken: another file is in its place"
