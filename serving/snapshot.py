"""The gateway's view of its configuration: how old it is, and which replicas serve a route."""

from __future__ import annotations

import time

from serving.errors import Unavailable
from serving.port import Replica, Route, Snapshot, SnapshotSource


class Configuration:
    """Hands out the current Snapshot while it is fresh enough to trust.

    Its age grows by the monotonic clock from the moment it was first seen, so that a step of the wall clock neither
    outdates nor rejuvenates it.
    """

    def __init__(self, source: SnapshotSource, max_age_s: float) -> None:
        self._source = source
        self._max_age_s = max_age_s
        self._taken_at = -1.0
        self._fresh_at = 0.0  # on the monotonic clock
        self._indexed: Snapshot | None = None
        self._by_deployment: dict[str, list[Replica]] = {}

    def current(self) -> Snapshot:
        """The Snapshot to decide by; raises Unavailable (never 401) when it is too old to know."""
        snapshot = self._source.current()
        if self.age_s(snapshot) > self._max_age_s:
            raise Unavailable(
                "The gateway's configuration is out of date; it cannot check this request.",
                code="configuration_stale",
            )
        return snapshot

    def peek(self) -> Snapshot:
        """The Snapshot whatever its age, for status pages."""
        return self._source.current()

    def age_s(self, snapshot: Snapshot) -> float:
        now = time.monotonic()
        if snapshot.taken_at != self._taken_at:
            self._taken_at = snapshot.taken_at
            self._fresh_at = now - max(0.0, time.time() - snapshot.taken_at)
        return now - self._fresh_at

    def replicas(self, snapshot: Snapshot, route: Route) -> list[Replica]:
        """Every replica of the route's deployments, fallbacks included, in any state."""
        if self._indexed is None or self._indexed.replicas is not snapshot.replicas:
            self._by_deployment = {}
            for replica in snapshot.replicas.values():
                self._by_deployment.setdefault(replica.deployment_id, []).append(replica)
        self._indexed = snapshot
        found: list[Replica] = []
        for deployment_id in dict.fromkeys([*(each.deployment_id for each in route.targets), *route.fallbacks]):
            found += self._by_deployment.get(deployment_id, ())
        return found
