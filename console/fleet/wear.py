"""How worn ready workers are: requests served, age, and memory, which is weighed now and then. See fleet.recycling."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.utils import timezone

from console.fleet import recycling
from console.fleet.models import Replica
from engine.devices.processes import private_bytes
from engine.launchers.base import Launcher

WEIGH_S = 10.0


class Wear:
    """Remembers when each worker was weighed last."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._weights: dict[UUID, tuple[float, int, int]] = {}  # when, at which epoch, bytes

    def tired(self, replica: Replica, stats: Mapping[str, Any]) -> str:
        """Why a replica should be replaced by a fresh one; empty while it may go on."""
        if replica.state != Replica.State.READY or replica.ready_at is None:
            return ""
        deployment, age_s = replica.deployment, (timezone.now() - replica.ready_at).total_seconds()
        finished = stats.get("requests_finished")
        life = recycling.Life(
            age_s=age_s,
            requests=sum(finished.values()) if isinstance(finished, dict) else None,
            rss_bytes=self._weigh(replica, age_s),
            settled_rss_bytes=replica.settled_rss_bytes,
            kv_bytes=int(replica.facts.get("kv_bytes") or 0),
        )
        limits = recycling.Limits(deployment.max_requests, deployment.max_age_s, deployment.max_rss_bytes)
        return recycling.tired(limits, life)

    def _weigh(self, replica: Replica, age_s: float) -> int | None:
        """Memory of a worker and of all that it started; what it has once warm is kept with the replica."""
        at, epoch, size = self._weights.get(replica.id, (0.0, -1, 0))
        if epoch != replica.epoch or time.monotonic() - at >= WEIGH_S:
            size = sum(private_bytes(pid) for pid in self._launcher.family(str(replica.id)))
            self._weights[replica.id] = (time.monotonic(), replica.epoch, size)
            if size and replica.settled_rss_bytes is None and age_s >= recycling.WARM_S:
                replica.settled_rss_bytes = size
                replica.save(update_fields=["settled_rss_bytes"])
        return size or None
