"""Refusals on their way to the journal: of a flood, one record a minute tells how many there were.

The first FOLD_ABOVE refusals of a key for one reason within a second leave a record each. The rest of their minute
become one: the first of them, with the number of all. That number stands in the table of requests in flight, so that
it outlives the process. Each gateway process counts for itself.
"""

from __future__ import annotations

import logging
import uuid

import msgspec

from serving.journal import Folded, Journal
from serving.port import Settled

log = logging.getLogger(__name__)

FOLD_ABOVE = 10  # a second, per key and reason
MAX_FOLDS = 256  # at once; beyond it each refusal has its own record again

Reason = tuple[str | None, str]  # key and error code


class Fold(msgspec.Struct):
    """Refusals of one key for one reason in one minute."""

    first: Settled
    slot: int
    requests: int = 0


class Folding:
    """All folds of one gateway process. Called from its event loop; nothing here awaits."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._seen: dict[Reason, int] = {}  # within the current second
        self._second = 0
        self._folds: dict[tuple[Reason, int], Fold] = {}

    def note(self, entry: Settled, second: int) -> None:
        """Journal a refusal or count it with others. `second` is any clock's that only goes forward."""
        reason = (entry.record.key_id, entry.record.code)
        if second != self._second:
            self._second = second
            self._seen.clear()
        seen = self._seen[reason] = self._seen.get(reason, 0) + 1
        if seen <= FOLD_ABOVE or not self._folded(reason, entry):
            self._journal.settle(entry, None)

    def end_minute(self, now: float) -> None:
        """Journal the folds of minutes that are over at `now` (wall seconds)."""
        current = _minute(now)
        for key in [key for key in self._folds if key[1] != current]:
            self._end(self._folds.pop(key))

    def close(self) -> None:
        """Journal every fold there is."""
        while self._folds:
            self._end(self._folds.popitem()[1])

    def _folded(self, reason: Reason, entry: Settled) -> bool:
        """Whether it could be counted with others; else it must have a record of its own."""
        key = (reason, _minute(entry.record.started_at))
        fold = self._folds.get(key)
        if fold is None:
            fold = self._begin(entry)
            if fold is None:
                return False
            self._folds[key] = fold
        fold.requests += 1
        self._journal.slots.update(fold.slot, _bytes(fold.first), 0, 0, fold.requests)
        return True

    def _begin(self, first: Settled) -> Fold | None:
        if len(self._folds) >= MAX_FOLDS:
            return None
        slots = self._journal.slots
        try:
            slot = slots.claim(_bytes(first))
        except OSError:
            return None
        try:
            self._journal.open(Folded(slot=slot, first=first))
        except OSError as error:
            log.error("journal: refusals are not folded: %s", error)
            slots.release(slot)
            return None
        return Fold(first, slot)

    def _end(self, fold: Fold) -> None:
        self._journal.settle(of_many(fold.first, fold.requests), fold.slot)


def of_many(first: Settled, requests: int) -> Settled:
    """The record of `requests` refusals, the first of which is known."""
    usage = None if first.usage is None else msgspec.structs.replace(first.usage, requests=requests)
    return msgspec.structs.replace(first, usage=usage, record=msgspec.structs.replace(first.record, requests=requests))


def _minute(wall: float) -> int:
    return int(wall // 60)


def _bytes(entry: Settled) -> bytes:
    return uuid.UUID(entry.record.id).bytes
