"""Admission: limits asked and reserved, a slot or a place in the queue taken, in one step or not at all."""

from __future__ import annotations

from typing import Any

from serving.coordination import wire
from serving.coordination.model.budgets import Budgets, window_missed
from serving.coordination.model.queue import Drain
from serving.coordination.model.requests import Pools, Record, choose
from serving.coordination.model.windows import Scope, allowances, whole_seconds

RETRY_TTL_S = 120
IDLE_S = 3600  # what nobody used for that long is forgotten


class State:
    """All that gateways share, and who is let in."""

    def __init__(self) -> None:
        self.scopes: dict[str, Scope] = {}
        self.budgets = Budgets()
        self.pools = Pools()
        self.epochs: dict[str, int] = {}
        self.batches: dict[str, int] = {}  # last batch of settlements seen of each process
        self.leases: dict[str, float] = {}
        self.heard: float | None = None
        self.tries: dict[tuple[str, str], tuple[int, int, float]] = {}  # number in the queue, times, until when
        self.numbers = 0
        self.now = 0.0

    def forget_idle(self) -> None:
        """Drop what an expiry drops in Valkey, so that memory does not grow with everything ever seen."""
        self.scopes = {
            name: scope for name, scope in self.scopes.items() if scope.concurrency or scope.at + IDLE_S > self.now
        }
        self.tries = {key: value for key, value in self.tries.items() if value[2] > self.now}
        drains = self.pools.drains
        self.pools.drains = {pool: drain for pool, drain in drains.items() if drain.touched + IDLE_S > self.now}
        self.budgets.drop_ended(self.now)

    @property
    def second(self) -> int:
        return int(self.now)

    # -- admission

    def admit(self, args: list[Any]) -> list[Any]:
        limits = args[wire.SCOPES]
        if not self.member(args[wire.PROCESS], args[wire.EPOCH]):
            return ["stranger"]
        if any(window_missed(limit[6], self.now) for limit in limits):
            return ["clock", self.now]
        scopes = [self.scope(limit[0]) for limit in limits]
        refusal = self._refusal(args, scopes)
        if refusal:
            return [*refusal, *allowances(scopes, limits, self.now)]
        used = self.pools.used(args[wire.CANDIDATES])
        number, retries = self.earlier_try(args)
        record = Record(args, self.second, number)
        placed = self._place(record)
        if not placed:
            depth = self.pools.depth(args[wire.POOL])
            wait = self.drain_s(args[wire.POOL], depth + 1)
            return ["full", depth, wait, *allowances(scopes, limits, self.now)]
        self.count(record, scopes)
        return [*placed, used, *allowances(scopes, limits, self.now), retries]

    def scope(self, name: str) -> Scope:
        scope = self.scopes.setdefault(name, Scope(self.second))
        scope.advance(self.second)
        return scope

    def _refusal(self, args: list[Any], scopes: list[Scope]) -> list[Any] | None:
        given, made, cost = args[wire.INPUT], args[wire.OUTPUT], args[wire.COST]
        for scope, limits in zip(scopes, args[wire.SCOPES], strict=True):
            found = scope.refuse(limits, (1, given + made, given, made), self.now)
            found = found or self.budgets.refuse(limits[6], cost, self.now)
            if found:
                return ["limit", limits[0].split(":", 1)[0], *found]
        return None

    def _place(self, record: Record) -> list[Any] | None:
        """["granted", replica, slots], ["waiting", position, depth], or None: the queue is full. The record is kept."""
        args, pools = record.args, self.pools
        depth = pools.depth(args[wire.POOL])
        replica, slots = choose(args, pools.slots, ()) if depth == 0 else ("", 0)
        records = pools.records.setdefault(args[wire.PROCESS], {})
        if replica:
            pools.take(record, replica, slots)
            records[args[wire.ID]] = record
            return ["granted", replica, slots]
        record.number = record.number or self.next_number()
        if self._full(record):
            self.remember_try(record)
            return None
        records[args[wire.ID]] = record
        pools.enqueue(record)
        if depth and pools.grant(args[wire.POOL], args[wire.ID]):
            return ["granted", record.replica, record.slots]
        return ["waiting", pools.position(record), pools.depth(args[wire.POOL])]

    def _full(self, record: Record) -> bool:
        queue = self.pools.queues.get(record.args[wire.POOL])
        depth, tokens = (queue.depth, queue.tokens) if queue else (0, 0)
        if depth >= record.args[wire.MAX_QUEUED]:
            return True
        return depth > 0 and tokens + record.cost > record.args[wire.MAX_TOKENS]

    def count(self, record: Record, scopes: list[Scope], known: bool = False) -> None:
        """Reserve its limits; rates of a request that was known have been counted."""
        args = record.args
        for scope, limits in zip(scopes, args[wire.SCOPES], strict=True):
            scope.concurrency += 1
            if not known:
                scope.add(self.second, (1, args[wire.INPUT], args[wire.OUTPUT]))
                scope.last = self.second
            for budget in limits[6]:
                self.budgets.change(budget[0], args[wire.COST], 0)

    # -- client calls that come again

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def earlier_try(self, args: list[Any]) -> tuple[int, int]:
        """Its number in the queue (0: none) and how often it was turned away."""
        number, times, until = self.tries.get((args[wire.TENANT], args[wire.FINGERPRINT]), (0, 0, 0.0))
        return (number, times) if until > self.now else (0, 0)

    def remember_try(self, record: Record) -> None:
        args = record.args
        if args[wire.FINGERPRINT]:
            times = self.earlier_try(args)[1] + 1
            key = (args[wire.TENANT], args[wire.FINGERPRINT])
            self.tries[key] = (record.number, times, self.now + RETRY_TTL_S)

    def drain_s(self, pool: str, ahead: int) -> int:
        drain: Drain | None = self.pools.drains.get(pool)
        return whole_seconds(drain.wait(ahead, self.now)) if drain else 10

    def member(self, process: str, epoch: int) -> bool:
        return self.epochs.get(process) == epoch
