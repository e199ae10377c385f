"""The health of all replicas as one process sees it: breakers, ejected outliers, the budget of retries."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping

import msgspec

from serving.health.breaker import Breaker, State
from serving.health.budget import RetryBudget
from serving.health.outcome import FAULT, NEUTRAL, OK
from serving.health.outliers import Account, allowed, outliers
from serving.health.window import Window
from serving.port import Replica

MAX_REPLICAS = 1024
JUDGED_EVERY_S = 1.0
ACCOUNT_S = 30
EJECTED_S, EJECTED_MAX_S = 30.0, 300.0
RECENT_S = 10.0  # a replica that was asked about within this time belongs to its pool
_MAX_LATENCIES = 64


class Event(msgspec.Struct, frozen=True):
    """A replica left or came back, for logs and metrics."""

    replica_id: str
    epoch: int
    what: str  # opened, closed, ejected, returned
    reason: str


class _Launch:
    """One launch of one replica."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.breaker = Breaker()
        self.window = Window(ACCOUNT_S)  # attempts, faults
        self.latencies: deque[tuple[float, float]] = deque(maxlen=_MAX_LATENCIES)
        self.asked = 0.0
        self.ejected_until = 0.0
        self.ejections = 0

    def account(self, now: float) -> Account:
        attempts, faults = self.window.counts(now)
        latencies = tuple(latency for at, latency in self.latencies if now - at <= ACCOUNT_S)
        return Account(attempts, faults, latencies)

    def event(self, what: str, reason: str) -> Event:
        return Event(self.replica.id, self.replica.epoch, what, reason)


class Health:
    """Tell it of every attempt: `begin` when it is sent, `note` at its first token or at its end without one, and
    `note` again should it break later. What an earlier launch did never counts against a new one."""

    def __init__(self) -> None:
        self._launches: OrderedDict[tuple[str, int], _Launch] = OrderedDict()
        self._pools: dict[str, list[_Launch]] = {}
        self._judged: dict[str, float] = {}
        self._budget = RetryBudget()

    def verdict(self, replica: Replica, now: float) -> str:
        """Empty if the replica may be asked, else why not."""
        launch = self._launch(replica)
        launch.asked = now
        verdict = launch.breaker.verdict(now)
        if not verdict and now < launch.ejected_until and self._others_serve(launch, now):
            return "ejected as an outlier"
        return verdict

    def begin(self, replica: Replica, now: float) -> None:
        """An attempt is sent."""
        self._budget.attempted(now)
        self._launch(replica).breaker.begin(now)

    def note(
        self, replica: Replica, outcome: str, latency_s: float | None, now: float, jitter: float
    ) -> tuple[Event, ...]:
        """How an attempt went (see `outcome_of`), its seconds to the first token, and what follows from it."""
        launch = self._launch(replica)
        before = launch.breaker.state(now)
        reason = launch.breaker.note(outcome, now, jitter)
        events = (launch.event("closed" if outcome == OK else "opened", reason),) if reason else ()
        if outcome == NEUTRAL or before is not State.CLOSED:
            return events  # while the breaker is at it, there is nothing to compare
        launch.window.note(now, 1, outcome == FAULT)
        if outcome == OK and latency_s is not None:
            launch.latencies.append((now, latency_s))
        return events + self._judge(replica.deployment_id, now)

    def may_retry(self, now: float) -> bool:
        """Whether the budget of retries has one left; if so, it is spent."""
        return self._budget.may_retry(now)

    def states(self, now: float) -> dict[str, str]:
        """What is not well, by replica id: open, half-open or ejected."""
        told: dict[str, str] = {}
        for launch in self._launches.values():
            state = launch.breaker.state(now)
            if state is not State.CLOSED or now < launch.ejected_until:
                told[launch.replica.id] = str(state) if state is not State.CLOSED else "ejected"
        return told

    def prune(self, replicas: Mapping[str, Replica]) -> None:
        """Forget replicas that are gone and launches that are over."""
        for replica_id, epoch in list(self._launches):
            replica = replicas.get(replica_id)
            if replica is None or replica.epoch != epoch:
                self._forget((replica_id, epoch))

    def _launch(self, replica: Replica) -> _Launch:
        key = (replica.id, replica.epoch)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = _Launch(replica)
            self._pools.setdefault(replica.deployment_id, []).append(launch)
            if len(self._launches) > MAX_REPLICAS:
                self._forget(next(iter(self._launches)))
        return launch

    def _forget(self, key: tuple[str, int]) -> None:
        launch = self._launches.pop(key)
        deployment_id = launch.replica.deployment_id
        self._pools[deployment_id].remove(launch)
        if not self._pools[deployment_id]:
            del self._pools[deployment_id]
            self._judged.pop(deployment_id, None)

    def _others_serve(self, launch: _Launch, now: float) -> bool:
        """Whether a peer that is well was asked about lately: else even an outlier is better than nobody."""
        return any(
            other is not launch
            and now - other.asked <= RECENT_S
            and now >= other.ejected_until
            and not other.breaker.verdict(now)
            for other in self._pools[launch.replica.deployment_id]
        )

    def _judge(self, deployment_id: str, now: float) -> tuple[Event, ...]:
        """Compare the replicas of a pool, at most once a second."""
        if now - self._judged.get(deployment_id, -JUDGED_EVERY_S) < JUDGED_EVERY_S:
            return ()
        self._judged[deployment_id] = now
        pool = {each.replica.id: each for each in self._pools[deployment_id] if now - each.asked <= RECENT_S}
        events = [each.event("returned", "its time is over") for each in pool.values() if _return(each, now)]
        room = allowed(len(pool)) - sum(now < each.ejected_until for each in pool.values())
        accounts = {name: each.account(now) for name, each in pool.items() if now >= each.ejected_until}
        for name, reason in list(outliers(accounts).items())[: max(room, 0)]:
            _eject(pool[name], now)
            events.append(pool[name].event("ejected", reason))
        return tuple(events)


def _eject(launch: _Launch, now: float) -> None:
    launch.ejections += 1
    launch.ejected_until = now + min(EJECTED_S * launch.ejections, EJECTED_MAX_S)
    launch.window.clear()
    launch.latencies.clear()


def _return(launch: _Launch, now: float) -> bool:
    """Whether its time outside has just ended."""
    if not launch.ejected_until or now < launch.ejected_until:
        return False
    launch.ejected_until = 0.0
    return True
