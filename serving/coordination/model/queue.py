"""The queue of a pool: classes in strict order, in each deficit round robin over tenants, in each by number.

Each tenant has a credit of tokens that grows by a quantum (times its weight) whenever the round comes to it, and pays
for the requests that are served. Class 0 is for requests that already ran once; 1 to 3 are the priorities.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection

CLASSES = 4
QUANTUM = 1024  # tokens of credit in each round, at weight 100

Ticket = tuple[int, str]  # (number in the queue, "<process> <request>")


class Row:
    """A tenant of whom requests wait in one class."""

    __slots__ = ("deficit", "tenant", "tickets", "weight")

    def __init__(self, tenant: str, weight: int) -> None:
        self.tenant = tenant
        self.weight = weight
        self.deficit = 0
        self.tickets: list[Ticket] = []

    @property
    def quantum(self) -> int:
        return max(1, QUANTUM * self.weight // 100)


Cost = Callable[[Row], int]  # tokens of a tenant's first request


class Ring:
    """The tenants of one class, in the order of the round; rows[head] is where it stands."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.head = 0

    def find(self, tenant: str) -> Row | None:
        return next((row for row in self.rows if row.tenant == tenant), None)

    def join(self, tenant: str, weight: int, ticket: Ticket) -> None:
        """Who begins to wait comes last in the round, which is just before its head."""
        row = self.find(tenant)
        if row is None:
            row = Row(tenant, weight)
            if self.rows:
                self.rows.insert(self.head, row)
                self.head += 1
            else:
                row.deficit = row.quantum
                self.rows, self.head = [row], 0
        row.weight = weight
        bisect.insort(row.tickets, ticket)

    def leave(self, tenant: str, ticket: Ticket) -> None:
        """A tenant of whom nobody waits any more leaves the round and takes no credit along."""
        row = self.find(tenant)
        assert row is not None, "who leaves a queue has joined it"
        row.tickets.remove(ticket)
        if row.tickets:
            return
        index = self.rows.index(row)
        del self.rows[index]
        if index < self.head:
            self.head -= 1
        elif index == self.head and self.rows:
            self.head %= len(self.rows)
            self.rows[self.head].deficit += self.rows[self.head].quantum

    def turn(self, skipped: Collection[str], cost: Cost) -> Row | None:
        """Whose turn it is: the first from the head on whose credit pays its first request. None: nobody is left."""
        for _ in range(2):
            for _ in range(len(self.rows)):
                row = self.rows[self.head]
                if row.tenant not in skipped and row.deficit >= cost(row):
                    return row
                self.head = (self.head + 1) % len(self.rows)
                row = self.rows[self.head]
                if row.tenant not in skipped:
                    row.deficit += row.quantum
            left = [row for row in self.rows if row.tenant not in skipped]
            if not left:
                return None
            rounds = max(0, min(math.ceil((cost(row) - row.deficit) / row.quantum) for row in left))
            for row in left:
                row.deficit += rounds * row.quantum
        return None


class Queue:
    """Who waits for the replicas of one pool. Slots are told in `totals`, as the last to join knew them."""

    def __init__(self) -> None:
        self.depth = 0
        self.tokens = 0
        self.rings = [Ring() for _ in range(CLASSES)]
        self.totals: dict[str, int] = {}

    def position(self, level: int, tenant: str, ticket: Ticket) -> int:
        """How many requests of the queue are served until this one is, itself included."""
        own = self.rings[level].find(tenant)
        assert own is not None
        rank = own.tickets.index(ticket)
        position = rank + 1 + sum(len(row.tickets) for ring in self.rings[:level] for row in ring.rows)
        others = (row for row in self.rings[level].rows if row is not own)
        return position + sum(min(len(row.tickets), rank * row.weight // own.weight) for row in others)


DRAIN_S = 30  # completions are counted in spans of this length


class Drain:
    """What a pool finished lately: completions in this span and in the one before."""

    __slots__ = ("before", "count", "since", "span", "touched")

    def __init__(self, now: float) -> None:
        self.span = math.floor(now / DRAIN_S)
        self.count = 0
        self.before = 0
        self.since = now
        self.touched = now

    def advance(self, now: float) -> None:
        span = math.floor(now / DRAIN_S)
        if span != self.span:
            self.before = self.count if self.span == span - 1 else 0
            self.count, self.span = 0, span

    def wait(self, ahead: int, now: float) -> float:
        """Seconds until `ahead` requests are through at that speed; 60 where nothing was finished."""
        self.advance(now)
        done = self.count + self.before
        if not done:
            return 60.0
        elapsed = max(0, min(now - self.since, now - (self.span - 1) * DRAIN_S))
        return ahead * elapsed / done
