"""Deployments without a worker: woken by the requests that want them, which wait or are told when to come back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from serving.coordination.contract import Coordinator
from serving.errors import Unavailable
from serving.port import Deployment, Route, Snapshot
from serving.snapshot import Configuration

WAKE_EVERY_S = 1.0  # telling more often than that changes nothing
LOOK_EVERY_S = 0.1


class Start(msgspec.Struct, frozen=True):
    """A deployment that will be able to answer, and in how many seconds, as earlier starts took."""

    deployment: Deployment
    eta_s: float


def coming(route: Route, snapshot: Snapshot, now: float) -> Start | None:
    """Of the route's targets, else of its fallbacks, the one that is ready soonest; None: waiting will not help.

    `now` is in wall seconds, as are the starts that the Snapshot tells of.
    """
    of_targets = [each.deployment_id for each in route.targets if each.role != "shadow" and each.weight > 0]
    for group in (of_targets, route.fallbacks):
        known = [snapshot.deployments[each] for each in group if each in snapshot.deployments]
        starts = [
            Start(each, _eta_s(each, now))
            for each in known
            if each.wakes or each.between or each.starting_at is not None
        ]
        if starts:
            return min(starts, key=lambda each: each.eta_s)
    return None


def _eta_s(deployment: Deployment, now: float) -> float:
    """One that takes longer than it used to is due any moment."""
    begun = now if deployment.starting_at is None else deployment.starting_at
    return max(1.0, begun + deployment.start_s - now)


def patience_s(route: Route, start: Start) -> float:
    """How long a request waits for it. One that is only between two replicas is waited for as in the route's queue."""
    if route.on_stopped == "hold":
        return route.hold_s
    return route.queue_timeout_s if start.deployment.between else 0.0


def refusal(start: Start) -> Unavailable:
    """Comes back when it will be there."""
    seconds = math.ceil(start.eta_s)
    why = "has no replica at the moment" if start.deployment.between else "was not running and is being started"
    return Unavailable(
        f"This model {why}; it takes about {seconds} seconds.",
        code="model_starting",
        retry_after=seconds,
    )


class Starts:
    """Wakes what sleeps, and counts who waits for it in this process."""

    def __init__(self, configuration: Configuration, coordinator: Coordinator) -> None:
        self._configuration = configuration
        self._coordinator = coordinator
        self._woken: dict[str, float] = {}  # when, by the monotonic clock
        self._held: Counter[str] = Counter()  # by route

    def coming(self, route: Route) -> Start | None:
        """What the route waits for, now."""
        return coming(route, self._configuration.peek(), time.time())

    def look(self, route: Route) -> Start | None:
        """The same; it is woken if it sleeps."""
        start = self.coming(route)
        if start is not None and start.deployment.wakes and start.deployment.starting_at is None:
            self._wake(start.deployment.id)
        return start

    @contextlib.contextmanager
    def holding(self, route: Route, start: Start) -> Iterator[None]:
        """While a request waits for it; raises Unavailable where the route lets no more of them wait."""
        if self._held[route.id] >= route.max_held:
            raise refusal(start)
        self._held[route.id] += 1
        try:
            yield
        finally:
            self._held[route.id] -= 1

    @property
    def held(self) -> int:
        """Requests that wait for a start here."""
        return self._held.total()

    async def news(self) -> None:
        """Return when the configuration may have changed."""
        await asyncio.sleep(LOOK_EVERY_S)

    def _wake(self, deployment_id: str) -> None:
        now = time.monotonic()
        if now - self._woken.get(deployment_id, -math.inf) >= WAKE_EVERY_S:
            self._woken = {each: at for each, at in self._woken.items() if now - at < WAKE_EVERY_S}
            self._woken[deployment_id] = now
            self._coordinator.wake(deployment_id)
