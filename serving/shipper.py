"""Delivers journals to a RecordSink: at least once, in order, never losing what the sink does not take.

Live journals are followed as they grow. A journal whose lock is free belongs to a dead process: it is adopted, and each
request that it opened and never settled is settled here as gateway_lost, billed from the slot table.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from serving import journal
from serving.folding import of_many
from serving.journal import Folded, Opened
from serving.metering import Billed, cost
from serving.port import Outcome, RecordRefused, RecordSink, RequestDetail, RequestRecord, Settled, UsageRecord

log = logging.getLogger(__name__)

BATCH = 500
POLL_S = 0.1
MAX_BACKOFF_S = 10.0
REFUSED = "refused.journal"  # beside the journals, in their format: what the sink will never take


class Cursor(msgspec.Struct):
    """How far a journal has been delivered: everything before this offset of this segment."""

    segment: str = ""
    offset: int = 0


class Tail:
    """Follows one journal. `open` holds what was opened and not yet settled, with the segment that says so."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.open: dict[str, Opened | Folded] = {}
        self._opened_in: dict[str, str] = {}
        self._cursor = _read_cursor(directory)
        self._marked = True
        self._next = Cursor()
        self._recall()

    def take(self, limit: int) -> list[Settled]:
        """The next settled records, not yet marked as delivered. A segment is known whole once a newer one exists."""
        taken: list[Settled] = []
        paths = journal.segments(self.directory)
        for index, path in enumerate(paths):
            if path.name < self._next.segment:
                continue
            if path.name > self._next.segment:
                self._next = Cursor(path.name, 0)
            for record in journal.read(path, self._next.offset):
                self._note(record.entry, path.name)
                self._next.offset = record.end
                if isinstance(record.entry, Settled):
                    taken.append(record.entry)
                    if len(taken) >= limit:
                        return taken
            if index + 1 < len(paths):
                self._tell_skipped(path)
        return taken

    def _tell_skipped(self, path: Path) -> None:
        """A segment that will not grow any more has been read as far as it can be."""
        rest = path.stat().st_size - self._next.offset
        if rest > 0:
            log.error("journal: %s is damaged: %d bytes from byte %d on are skipped", path, rest, self._next.offset)

    def commit(self) -> None:
        """What `take` returned has been delivered: remember it, and delete the segments that nobody needs."""
        if self._next == self._cursor and self._marked:
            return
        self._cursor = Cursor(self._next.segment, self._next.offset)
        self._delete_delivered()
        self._mark()

    def _delete_delivered(self) -> None:
        needed = min(self._opened_in.values(), default=self._cursor.segment)
        for path in journal.segments(self.directory):
            if path.name < min(needed, self._cursor.segment):
                path.unlink(missing_ok=True)

    def _mark(self) -> None:
        """A full disk takes no mark, and must not keep its own relief from going on: without one, all comes twice."""
        try:
            _write_cursor(self.directory, self._cursor)
            self._marked = True
        except OSError as error:
            if self._marked:  # told once, not with every try
                log.warning("journal: %s: cannot mark how far it is delivered: %s", self.directory.name, error)
            self._marked = False

    def rewind(self) -> None:
        """Delivery failed: read again from the last mark."""
        self.open.clear()
        self._opened_in.clear()
        self._recall()

    def lost(self) -> list[Settled]:
        """What its dead gateway left unsettled."""
        for path in journal.segments(self.directory)[-1:]:
            if path.name == self._next.segment:
                self._tell_skipped(path)
        slots = journal.read_slots(self.directory / "slots")
        return [_lost(entry, slots) for entry in self.open.values()]

    def _recall(self) -> None:
        """Learn again which requests are open, from the segments before the cursor."""
        self._next = Cursor(self._cursor.segment, self._cursor.offset)
        for path in journal.segments(self.directory):
            if path.name > self._cursor.segment:
                return
            for record in journal.read(path):
                if path.name == self._cursor.segment and record.end > self._cursor.offset:
                    return
                self._note(record.entry, path.name)

    def _note(self, entry: journal.Entry, segment: str) -> None:
        if not isinstance(entry, Settled):
            self.open[entry.id] = entry
            self._opened_in[entry.id] = segment
        else:
            self.open.pop(entry.record.id, None)
            self._opened_in.pop(entry.record.id, None)


class Shipper:
    """The only reader of the journals below a root (a lock sees to that)."""

    def __init__(self, journal_root: Path, sink: RecordSink) -> None:
        self._root = journal_root
        self._sink = sink
        self._tails: dict[Path, Tail] = {}
        self._lock: int | None = None

    def run(self, stop: threading.Event) -> None:
        """Deliver until told to stop, then once more what is there. Backs off while the sink is away."""
        wait = POLL_S
        while not stop.wait(wait):
            wait = self._deliver_or_back_off(wait)
        self._deliver_or_back_off(wait)
        self.close()

    def run_once(self) -> int:
        """Deliver all there is now; returns how many records. Raises what the sink raises, with nothing lost."""
        if not self._acquire():
            return 0
        delivered = 0
        found = journal.directories(self._root)
        for directory in found:
            delivered += self._ship(directory)
        for gone in self._tails.keys() - set(found):
            del self._tails[gone]
        return delivered

    def close(self) -> None:
        """Let another shipper take over."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _deliver_or_back_off(self, waited: float) -> float:
        try:
            self.run_once()
        except Exception:
            wait = min(max(waited, POLL_S) * 2, MAX_BACKOFF_S)
            log.exception("shipper: not delivered, trying again in %.1f s; nothing is lost", wait)
            return wait
        return POLL_S

    def _acquire(self) -> bool:
        if self._lock is None:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = journal.try_lock(self._root / "shipper.lock")
            if self._lock is None:
                log.info("shipper: another one is at work here")
            else:
                journal.sweep(self._root)
        return self._lock is not None

    def _ship(self, directory: Path) -> int:
        # asked before reading: a process that dies afterwards is adopted in the next round
        dead = journal.try_lock(directory / "lock")
        try:
            tail = self._tails.get(directory)
            if tail is None:
                tail = self._tails[directory] = Tail(directory)
            delivered = self._drain(tail)
            if dead is not None:
                delivered += self._adopt(tail)
                journal.remove(directory)
            return delivered
        finally:
            if dead is not None:
                os.close(dead)

    def _drain(self, tail: Tail) -> int:
        delivered = 0
        while True:
            try:
                batch = tail.take(BATCH)
                if batch:
                    self._deliver(batch)
            except BaseException:
                tail.rewind()
                raise
            tail.commit()
            delivered += len(batch)
            if len(batch) < BATCH:
                return delivered

    def _adopt(self, tail: Tail) -> int:
        lost = tail.lost()
        if lost:
            log.warning("shipper: %s died with %d requests in flight", tail.directory.name, len(lost))
        for batch in _batches(lost):
            self._deliver(batch)
        return len(lost)

    def _deliver(self, batch: list[Settled]) -> None:
        """Hand over a batch. A record that the sink will never take is set aside, or nothing would get past it."""
        try:
            self._sink.write(batch)
        except RecordRefused as refused:
            if len(batch) == 1:
                self._without_content_or_aside(batch[0], refused)
                return
            middle = len(batch) // 2
            self._deliver(batch[:middle])
            self._deliver(batch[middle:])

    def _without_content_or_aside(self, entry: Settled, refused: RecordRefused) -> None:
        """Words may be what is refused, and where records are set aside nobody deletes them in time."""
        if entry.content is None:
            self._set_aside(entry, refused)
        else:
            log.warning("shipper: the words of %s are not kept: the record is refused with them", entry.record.id)
            self._deliver([msgspec.structs.replace(entry, content=None)])

    def _set_aside(self, entry: Settled, refused: RecordRefused) -> None:
        log.error("shipper: record %s is refused for good (%s): kept in %s", entry.record.id, refused, REFUSED)
        with (self._root / REFUSED).open("ab") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(journal.encoded(entry))
            file.flush()
            os.fsync(file.fileno())


def _batches(records: list[Settled]) -> Iterable[list[Settled]]:
    return (records[at : at + BATCH] for at in range(0, len(records), BATCH))


def _lost(entry: Opened | Folded, slots: dict[bytes, tuple[int, int, int]]) -> Settled:
    """Settle for a dead gateway: at least what its client received, and all refusals that it had counted."""
    prompt, cached, completion = slots.get(uuid.UUID(entry.id).bytes, (0, 0, 0))
    if isinstance(entry, Folded):
        return of_many(entry.first, max(completion, 1))
    counts: dict[str, Any] = {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion}
    price = entry.price
    owed = cost(Billed(prompt, cached, completion), price)
    money: dict[str, Any] = {"cost": owed, "currency": price.currency if price else ""}
    usage = UsageRecord(
        **_noted(entry, UsageRecord),
        **counts,
        **money,
        outcome=Outcome.GATEWAY_LOST,
        price_version=price.version if price else None,
    )
    record = RequestRecord(
        **_noted(entry, RequestRecord),
        **counts,
        **money,
        outcome=Outcome.GATEWAY_LOST,
        status=0,
        code="gateway_lost",
        attempts=1 if entry.replica_id else 0,
    )
    detail = RequestDetail(
        id=entry.id,
        started_at=entry.started_at,
        error="The gateway process died while this request was running.",
    )
    return Settled(usage=usage, record=record, detail=detail)


def _noted(entry: Opened, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """What was noted at the opening and stands under the same name in a record of that kind."""
    return {name: getattr(entry, name) for name in kind.__struct_fields__ if name in entry.__struct_fields__}


def _read_cursor(directory: Path) -> Cursor:
    try:
        return msgspec.json.decode((directory / "cursor").read_bytes(), type=Cursor)
    except (FileNotFoundError, msgspec.DecodeError):
        return Cursor()


def _write_cursor(directory: Path, cursor: Cursor) -> None:
    path, fresh = directory / "cursor", directory / "cursor.new"
    fresh.write_bytes(msgspec.json.encode(cursor))
    fresh.replace(path)


def unshipped_bytes(directory: Path) -> int:
    """Bytes of this journal that no sink has taken yet."""
    cursor = _read_cursor(directory)
    total = 0
    for path in journal.segments(directory):
        with contextlib.suppress(FileNotFoundError):
            if path.name >= cursor.segment:
                total += path.stat().st_size
    return max(total - cursor.offset, 0)
