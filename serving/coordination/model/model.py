"""The functions of the library over state in memory: `call(name, arguments, now)` answers as Valkey would.

The time is passed in, nothing waits and nothing is sent: what the library publishes is appended to `pools.published`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serving.coordination import wire
from serving.coordination.model.budgets import Budgets, window_missed
from serving.coordination.model.queue import Drain
from serving.coordination.model.requests import Pools, Record, choose
from serving.coordination.model.windows import Scope, allowances, whole_seconds

LEASE_S = 3
REAPED_AT_ONCE = 500
RETRY_TTL_S = 120
IDLE_S = 3600  # what nobody used for that long is forgotten

Used = Sequence[int] | str  # (input, output, cost), "refused" or "lost"


class Model:
    """All that gateways share."""

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

    def call(self, name: str, args: Sequence[Any], now: float) -> list[Any]:
        """Run one function of the library; its arguments and answers are described there."""
        self.now = now
        if name == "admit":
            return self._admit(list(args))
        functions: dict[str, Callable[..., list[Any]]] = {
            "settle": self._settle,
            "timeout": self._timeout,
            "move": self._move,
            "beat": self._beat,
            "hello": self._hello,
            "restore": self._restore,
            "correct": self._correct,
            "read": self._read,
        }
        return functions[name](*args)

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

    def _admit(self, args: list[Any]) -> list[Any]:
        limits = args[wire.SCOPES]
        if not self._member(args[wire.PROCESS], args[wire.EPOCH]):
            return ["stranger"]
        if any(window_missed(limit[6], self.now) for limit in limits):
            return ["clock", self.now]
        scopes = [self._scope(limit[0]) for limit in limits]
        refusal = self._refusal(args, scopes)
        if refusal:
            return [*refusal, *allowances(scopes, limits, self.now)]
        used = self.pools.used(args[wire.CANDIDATES])
        number, retries = self._earlier_try(args)
        record = Record(args, self.second, number)
        placed = self._place(record)
        if not placed:
            depth = self.pools.depth(args[wire.POOL])
            wait = self._drain_s(args[wire.POOL], depth + 1)
            return ["full", depth, wait, *allowances(scopes, limits, self.now)]
        self._count(record, scopes)
        return [*placed, used, *allowances(scopes, limits, self.now), retries]

    def _scope(self, name: str) -> Scope:
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
        record.number = record.number or self._next_number()
        if self._full(record):
            self._remember_try(record)
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

    def _count(self, record: Record, scopes: list[Scope], known: bool = False) -> None:
        """Reserve its limits; rates of a request that was known have been counted."""
        args = record.args
        for scope, limits in zip(scopes, args[wire.SCOPES], strict=True):
            scope.concurrency += 1
            if not known:
                scope.add(self.second, (1, args[wire.INPUT], args[wire.OUTPUT]))
                scope.last = self.second
            for budget in limits[6]:
                self.budgets.change(budget[0], args[wire.COST], 0)

    # -- the end of a request, and its further attempts

    def _settle(self, process: str, batch: int, settlements: Sequence[Any]) -> list[Any]:
        if batch <= self.batches.get(process, 0):
            return [0]
        records = self.pools.records.get(process, {})
        known = [records.get(settlement[0]) for settlement in settlements]
        for record, (_, used, budgets) in zip(known, settlements, strict=True):
            if record is not None:
                self._release(record, used or "refused")
                if used:
                    self.tries.pop((record.args[wire.TENANT], record.args[wire.FINGERPRINT]), None)
            elif used and used[2] > 0:
                for name in budgets:
                    self.budgets.change(name, 0, used[2])
        self.batches[process] = batch
        self._grant_all({record.args[wire.POOL] for record in known if record})
        return [known.count(None)]

    def _timeout(self, process: str, epoch: int, request: str) -> list[Any]:
        record = self._record(process, epoch, request)
        if record is None:
            return ["unknown"]
        if record.replica:
            return ["granted", record.replica, record.slots, []]
        pool = record.args[wire.POOL]
        self._remember_try(record)
        self._release(record, "refused")
        depth = self.pools.depth(pool)
        self._grant_all({pool})
        return ["timeout", self._drain_s(pool, depth + 1), depth]

    def _move(
        self, process: str, epoch: int, request: str, pool: str, candidates: Sequence[Any], least: bool
    ) -> list[Any]:
        record = self._record(process, epoch, request)
        if record is None:
            return ["unknown"]
        pools, args = self.pools, record.args
        left = args[wire.POOL]
        if record.replica:
            pools.free(record)
            args[wire.CLASS], record.number = 0, self._next_number()
        else:
            pools.dequeue(record)
        args[wire.POOL], args[wire.CANDIDATES], args[wire.LEAST] = pool, candidates, least
        record.replica, record.slots = "", 0
        used = pools.used(candidates)
        replica, slots = choose(args, pools.slots, ())
        if replica and (args[wire.CLASS] == 0 or pools.depth(pool) == 0):
            pools.take(record, replica, slots)
        else:
            pools.enqueue(record)
            pools.grant(pool, request)
        reply = ["granted", record.replica, record.slots]
        if not record.replica:
            reply = ["waiting", pools.position(record), pools.depth(pool)]
        self._grant_all({left, pool})
        return [*reply, used, False, False, 0]

    def _release(self, record: Record, used: Used) -> None:
        """Take a request off everything that it holds.

        used: what it is settled with; "refused": it counts for nothing; "lost": rates stay as reserved.
        """
        args, pools = record.args, self.pools
        change, cost = (0, 0, 0), 0
        if used == "refused":
            change = (-1, -args[wire.INPUT], -args[wire.OUTPUT])
        elif not isinstance(used, str):
            change, cost = (0, used[0] - args[wire.INPUT], used[1] - args[wire.OUTPUT]), used[2]
        for limits in args[wire.SCOPES]:
            scope = self._scope(limits[0])
            scope.concurrency -= 1
            if record.second in scope.buckets:
                scope.add(record.second, change)
            for budget in limits[6]:
                self.budgets.change(budget[0], -args[wire.COST], cost)
        if not record.replica:
            pools.dequeue(record)
        else:
            pools.free(record)
            if not isinstance(used, str):
                pools.completed(args[wire.POOL], self.now)
        del pools.records[args[wire.PROCESS]][args[wire.ID]]

    def _record(self, process: str, epoch: int, request: str) -> Record | None:
        return self.pools.records.get(process, {}).get(request) if self._member(process, epoch) else None

    def _grant_all(self, pools: set[str]) -> None:
        for pool in sorted(pools):
            self.pools.grant(pool)

    # -- client calls that come again

    def _next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def _earlier_try(self, args: list[Any]) -> tuple[int, int]:
        """Its number in the queue (0: none) and how often it was turned away."""
        number, times, until = self.tries.get((args[wire.TENANT], args[wire.FINGERPRINT]), (0, 0, 0.0))
        return (number, times) if until > self.now else (0, 0)

    def _remember_try(self, record: Record) -> None:
        args = record.args
        if args[wire.FINGERPRINT]:
            times = self._earlier_try(args)[1] + 1
            key = (args[wire.TENANT], args[wire.FINGERPRINT])
            self.tries[key] = (record.number, times, self.now + RETRY_TTL_S)

    def _drain_s(self, pool: str, ahead: int) -> int:
        drain: Drain | None = self.pools.drains.get(pool)
        return whole_seconds(drain.wait(ahead, self.now)) if drain else 10

    # -- processes

    def _member(self, process: str, epoch: int) -> bool:
        return self.epochs.get(process) == epoch

    def _hello(self, process: str, epoch: int) -> list[Any]:
        self.epochs[process] = epoch
        self.leases[process] = self.now + LEASE_S
        return [self.batches.get(process, 0), self.now, len(self.leases)]

    def _beat(self, process: str, epoch: int, waiting: Sequence[str]) -> list[Any]:
        if not self._member(process, epoch):
            return ["stranger"]
        self.leases[process] = self.now + LEASE_S
        self._reap()
        records = self.pools.records.get(process, {})
        depths = {pool: queue.depth for pool, queue in self.pools.queues.items()}
        standings = [self._standing(request, records.get(request)) for request in waiting]
        return [self.now, len(self.leases), _flat(depths), _flat(self.pools.slots), standings]

    def _standing(self, request: str, record: Record | None) -> list[Any]:
        if record is None:
            return [request, "unknown"]
        if record.replica:
            return [request, "granted", record.replica, record.slots]
        return [request, "waiting", self.pools.position(record)]

    def _reap(self) -> None:
        """Give back what processes hold that have not been heard of for a lease, unless the clock jumped."""
        heard = self.now if self.heard is None else self.heard
        self.heard = self.now
        if self.now - heard > LEASE_S - 1 or self.now < heard:
            self.leases = dict.fromkeys(self.leases, self.now + LEASE_S)
            return
        left, touched = REAPED_AT_ONCE, set()
        for process in [process for process, ends in self.leases.items() if ends < self.now]:
            self.epochs.pop(process, None)
            for record in list(self.pools.records.get(process, {}).values())[:left]:
                left -= 1
                touched.add(record.args[wire.POOL])
                self._release(record, "lost")
            if left > 0:
                del self.leases[process]
                self.pools.records.pop(process, None)
        self._grant_all(touched)

    def _restore(
        self, process: str, epoch: int, requests: Sequence[str] | bool, entries: Sequence[Sequence[Any]]
    ) -> list[Any]:
        if not self._member(process, epoch):
            return ["stranger"]
        records = self.pools.records.setdefault(process, {})
        touched: set[str] = set()
        if not isinstance(requests, bool):
            for request in records.keys() - set(requests):
                touched.add(records[request].args[wire.POOL])
                self._release(records[request], "refused")
        for args, replica, slots in entries:
            known = records.get(args[wire.ID])
            record = Record(list(args), self.second, 0)
            if known:
                touched.add(known.args[wire.POOL])
                self._release(known, "lost")
                record.second, record.number = known.second, known.number
            record.number = record.number or self._next_number()
            self._count(record, [self._scope(limits[0]) for limits in args[wire.SCOPES]], known is not None)
            records[args[wire.ID]] = record
            touched.add(args[wire.POOL])
            if replica:
                self.pools.take(record, replica, slots)
            else:
                self.pools.enqueue(record)
        self._grant_all(touched)
        return []

    # -- the console

    def _correct(self, name: str, read: str, right: str) -> list[Any]:
        reserved, spent = self.budgets.read(name)
        same = str(spent) == read
        if same:
            self.budgets.change(name, 0, int(right) - spent)
        return [same, str(reserved), right if same else str(spent)]

    def _read(self, names: Sequence[str], budgets: Sequence[str]) -> list[Any]:
        scopes = []
        for name in names:
            scope = self.scopes.get(name) or Scope(self.second)
            scope.advance(self.second)
            scopes.append([*scope.sums, scope.concurrency])
        money = [[str(amount) for amount in self.budgets.read(name)] for name in budgets]
        depths = {pool: queue.depth for pool, queue in self.pools.queues.items()}
        return [self.now, scopes, money, _flat(depths), _flat(self.pools.slots)]


def _flat(counts: dict[str, int]) -> list[str]:
    """A hash as Valkey tells it: name, value, name, value."""
    return [item for name, count in counts.items() for item in (name, str(count))]
