"""Which KV blocks have a copy in host memory, by the hash of the prefix they hold.

The second level of the prefix cache. Blocks come here when a sequence is preempted, or when a shared prefix falls out
of the device's cache; admission looks them up after the device's. Bookkeeping only: the bytes are the runner's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostCache:
    """Slots by hash, the least recently used given up first.

    A slot that a copy of the planned step reads or writes is pinned until `settle` or `discard`, so that the same step
    does not reuse it. Pinning makes a slot the most recent, so where the oldest is pinned there is no use in searching.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._pinned: set[bytes] = set()
        self._written: list[bytes] = []

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Slots of the longest run of digests that are here; pins nothing."""
        found: list[int] = []
        for digest in digests:
            slot = self._slots.get(digest)
            if slot is None:
                break
            found.append(slot)
        return found

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these where they are until the step is over; they were just used."""
        for digest in digests:
            self._slots.move_to_end(digest)
            self._pinned.add(digest)

    def store(self, digest: bytes) -> int | None:
        """A slot to copy this block into, or None if it is here already or no slot can be given up."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return None
        if not self._free and not self._evict():
            return None
        slot = self._slots[digest] = self._free.pop()
        self._pinned.add(digest)
        self._written.append(digest)
        return slot

    def settle(self) -> None:
        """The step's copies are done."""
        self._pinned.clear()
        self._written.clear()

    def discard(self) -> None:
        """The step failed: what it should have written is not here."""
        for digest in self._written:
            self._free.append(self._slots.pop(digest))
        self.settle()

    def check(self) -> None:
        """Raise AssertionError unless every slot is free or holds one block."""
        slots = [*self._free, *self._slots.values()]
        assert sorted(slots) == list(range(self.num_slots)), "used + free != host slots"
        assert self._pinned <= self._slots.keys(), "a pinned block is not here"

    def _evict(self) -> bool:
        oldest = next(iter(self._slots), None)
        if oldest is None or oldest in self._pinned:
            return False
        self._free.append(self._slots.pop(oldest))
        self.evictions += 1
        return True
