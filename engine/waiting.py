"""The sequences that hold no blocks, and which of them is admitted next."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain

from engine.fairness import FairShares
from engine.sequence import Sequence
from engine.types import Status


class WaitingQueue:
    """Lower priority value first; then preempted before new; then the least served tenant; then arrival.

    Preempted sequences come first because they were admitted, and charged, before. The next one is never skipped for a
    smaller one, so a long prompt waits for room but is not overtaken for ever. Only a steady load of better priority
    can starve a sequence: that is what priority means.
    """

    def __init__(self, shares: FairShares) -> None:
        self.num_tokens = 0
        self._count = 0
        self._shares = shares
        self._preempted: list[Sequence] = []
        self._new: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted, *self._new.values())

    def tenants(self) -> list[str]:
        """Tenants with a sequence that was never admitted."""
        return list(self._new)

    def add(self, sequence: Sequence) -> None:
        """Queue a new or a preempted sequence."""
        new = sequence.status is Status.WAITING
        insort(self._new.setdefault(sequence.tenant, []) if new else self._preempted, sequence, key=lambda s: s.order)
        self.num_tokens += sequence.num_tokens
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, before its status changes."""
        self.num_tokens -= sequence.num_tokens
        self._count -= 1
        if sequence.status is not Status.WAITING:
            self._preempted.remove(sequence)
            return
        queue = self._new[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._new[sequence.tenant]

    def head(self) -> Sequence | None:
        """Who is next, or None."""
        served = self._shares.served
        firsts = (queue[0] for queue in self._new.values())
        new = min(firsts, key=lambda s: (s.priority, served(s.tenant), s.id), default=None)
        if self._preempted and (new is None or self._preempted[0].priority <= new.priority):
            return self._preempted[0]
        return new
