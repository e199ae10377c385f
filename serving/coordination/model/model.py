"""The functions of the library over state in memory: `call(name, arguments, now)` answers as Valkey would.

The time is passed in, nothing waits and nothing is sent: what the library publishes is appended to `pools.published`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serving.coordination import wire
from serving.coordination.model.admission import State
from serving.coordination.model.requests import Record, choose
from serving.coordination.model.windows import Scope

LEASE_S = 3
REAPED_AT_ONCE = 500

Used = Sequence[int] | str  # (input, output, cost), "refused" or "lost"


class Model(State):
    """All functions of the library."""

    def call(self, name: str, args: Sequence[Any], now: float) -> list[Any]:
        """Run one function of the library; its arguments and answers are described there."""
        self.now = now
        if name == "admit":
            return self.admit(list(args))
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
        self.remember_try(record)
        self._release(record, "refused")
        depth = self.pools.depth(pool)
        self._grant_all({pool})
        return ["timeout", self.drain_s(pool, depth + 1), depth]

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
            args[wire.CLASS], record.number = 0, self.next_number()
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
            scope = self.scope(limits[0])
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
        return self.pools.records.get(process, {}).get(request) if self.member(process, epoch) else None

    def _grant_all(self, pools: set[str]) -> None:
        for pool in sorted(pools):
            self.pools.grant(pool)

    # -- processes

    def _hello(self, process: str, epoch: int) -> list[Any]:
        self.epochs[process] = epoch
        self.leases[process] = self.now + LEASE_S
        return [self.batches.get(process, 0), self.now, len(self.leases)]

    def _beat(self, process: str, epoch: int, waiting: Sequence[str]) -> list[Any]:
        if not self.member(process, epoch):
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
        if not self.member(process, epoch):
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
            record.number = record.number or self.next_number()
            self.count(record, [self.scope(limits[0]) for limits in args[wire.SCOPES]], known is not None)
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
