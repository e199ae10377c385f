"""Requests admitted and not settled, the slots they hold, and who gets a slot that is free."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from serving.coordination import wire
from serving.coordination.model.queue import Drain, Queue, Row, Ticket


class Record:
    """One request of one process. `replica` is "" while it waits; `number` is its place in the queue."""

    __slots__ = ("args", "number", "replica", "second", "slots")

    def __init__(self, args: list[Any], second: int, number: int) -> None:
        self.args = args
        self.second = second  # of its admission
        self.number = number
        self.replica = ""
        self.slots = 0

    @property
    def cost(self) -> int:
        return max(1, int(self.args[wire.INPUT]) + int(self.args[wire.OUTPUT]))

    @property
    def ticket(self) -> Ticket:
        return self.number, f"{self.args[wire.PROCESS]} {self.args[wire.ID]}"


def choose(args: Sequence[Any], used: Mapping[str, int], held: Collection[str]) -> tuple[str, int]:
    """The replica to take ("": none) and how many of its slots: at most as many as the largest candidate has.

    held: replicas kept free for somebody who was first.
    """
    candidates, wanted = args[wire.CANDIDATES], args[wire.SLOTS]
    wanted = min(wanted, max((total or wanted for _, total in candidates), default=0))
    free = [
        (replica, used.get(replica, 0) / total if total else 0.0)
        for replica, total in candidates
        if replica not in held and (total == 0 or used.get(replica, 0) + wanted <= total)
    ]
    if not free:
        return "", wanted
    if args[wire.LEAST]:
        return min(free, key=lambda replica: replica[1])[0], wanted
    return free[0][0], wanted


class Pools:
    """Slots, queues and speeds of all pools."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.queues: dict[str, Queue] = {}
        self.drains: dict[str, Drain] = {}
        self.records: dict[str, dict[str, Record]] = {}  # by process and id
        self.published: list[tuple[str, list[Any]]] = []  # (process, [id, replica, slots, in use before])

    def used(self, candidates: Sequence[Sequence[Any]]) -> list[int]:
        """Slots in use of each candidate, in their order."""
        return [self.slots.get(replica, 0) for replica, _ in candidates]

    def depth(self, pool: str) -> int:
        queue = self.queues.get(pool)
        return queue.depth if queue else 0

    def take(self, record: Record, replica: str, slots: int) -> None:
        record.replica, record.slots = replica, slots
        self.slots[replica] = self.slots.get(replica, 0) + slots

    def free(self, record: Record) -> None:
        self.slots[record.replica] -= record.slots
        if self.slots[record.replica] <= 0:
            del self.slots[record.replica]

    def completed(self, pool: str, now: float) -> None:
        drain = self.drains.setdefault(pool, Drain(now))
        drain.advance(now)
        drain.count += 1
        drain.touched = now

    def enqueue(self, record: Record) -> None:
        args = record.args
        queue = self.queues.setdefault(args[wire.POOL], Queue())
        queue.rings[args[wire.CLASS]].join(args[wire.TENANT], args[wire.WEIGHT], record.ticket)
        queue.depth += 1
        queue.tokens += record.cost
        queue.totals.update(dict(args[wire.CANDIDATES]))

    def dequeue(self, record: Record) -> None:
        args = record.args
        queue = self.queues[args[wire.POOL]]
        queue.rings[args[wire.CLASS]].leave(args[wire.TENANT], record.ticket)
        queue.depth -= 1
        queue.tokens -= record.cost

    def position(self, record: Record) -> int:
        args = record.args
        return self.queues[args[wire.POOL]].position(args[wire.CLASS], args[wire.TENANT], record.ticket)

    def grant(self, pool: str, mine: str = "") -> list[Any] | None:
        """Hand out what is free to who waits. Returns [replica, slots, in use before] of `mine` if it got some."""
        queue = self.queues.get(pool)
        if queue is None:
            return None
        found = None
        held: set[str] = set()
        for level in range(len(queue.rings)):
            found = self._grant_class(queue, level, held, mine) or found
        if not queue.depth:
            del self.queues[pool]
        return found

    def _grant_class(self, queue: Queue, level: int, held: set[str], mine: str) -> list[Any] | None:
        """Serve one class. Whose turn it is but for whom no slot is free keeps its replicas free for itself, so that a
        large request is not overtaken for ever, while others may use the rest."""
        ring, found = queue.rings[level], None
        skipped: set[str] = set()
        while ring.rows and self._any_free(queue, held):
            row = ring.turn(skipped, lambda row: self._first(row).cost)
            if row is None:
                break
            record = self._first(row)
            replica, slots = choose(record.args, self.slots, held)
            if replica:
                found = self._give(row, record, replica, slots, mine) or found
            else:
                skipped.add(row.tenant)
                held.update(replica for replica, _ in record.args[wire.CANDIDATES])
        return found

    def _any_free(self, queue: Queue, held: Collection[str]) -> bool:
        return any(
            replica not in held and (total == 0 or self.slots.get(replica, 0) < total)
            for replica, total in queue.totals.items()
        )

    def _first(self, row: Row) -> Record:
        process, request = row.tickets[0][1].split(" ", 1)
        return self.records[process][request]

    def _give(self, row: Row, record: Record, replica: str, slots: int, mine: str) -> list[Any] | None:
        before = self.used(record.args[wire.CANDIDATES])
        row.deficit -= record.cost
        self.dequeue(record)
        self.take(record, replica, slots)
        if record.args[wire.ID] == mine:
            return [replica, slots, before]
        self.published.append((record.args[wire.PROCESS], [record.args[wire.ID], replica, slots, before]))
        return None
