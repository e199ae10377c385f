"""What survives a kill -9: an append-only journal per gateway process, and a table of the requests in flight.

    <journal_root>/<instance>-<start>-<random>/
        lock              held with flock while the process lives
        slots             mmap: one fixed record per request in flight, tokens received so far
        00000001.journal  segments: [length u32][CRC-32 u32][msgpack] per record: Opened, Folded or Settled
        cursor            written by the shipper: how far it has delivered

A record is in the page cache before the step that it allows (dispatch, or forgetting the request) is taken; a thread
calls fdatasync every 50 ms, so a power loss may cost that much and a killed process nothing. Segments are never
truncated in place: after a torn write the next record goes to a new one. The shipper deletes what it has delivered.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from serving.port import Price, Settled

log = logging.getLogger(__name__)

SEGMENT_BYTES = 8 * 1024 * 1024
SEGMENT_AGE_S = 60.0
SYNC_EVERY_S = 0.05
SUFFIX = ".journal"
_SHIPPED = ".shipped"
MAX_UNWRITTEN = 10_000  # some 20 MB; what was dispatched is bounded by its slots besides
_HEADER = struct.Struct("<II")
_MAX_RECORD = 1024 * 1024
_SLOT = struct.Struct("<16sIII4x")


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """Written before dispatch: all that is needed to bill the request if nobody is left to settle it."""

    id: str
    slot: int
    started_at: float
    tenant_id: str
    key_id: str
    source: str
    endpoint: str
    model: str
    stream: bool
    prompt_estimate: int
    price: Price | None = None
    deployment_id: str | None  # None: it waited for a replica
    replica_id: str | None
    device: str
    end_user: str
    client_request_id: str
    trace_id: str
    gateway: str
    gateway_version: str
    snapshot_version: int
    engine_version: str


class Folded(msgspec.Struct, frozen=True, kw_only=True, tag="folded"):
    """Written before more refusals are counted with this one: how many stands as its slot's completion tokens."""

    slot: int
    first: Settled

    @property
    def id(self) -> str:
        return self.first.record.id


Entry = Opened | Folded | Settled
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encoded(entry: Entry) -> bytes:
    """One framed record."""
    payload = _encoder.encode(entry)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


class SlotTable:
    """Tokens of each request in flight, where they outlive the process."""

    def __init__(self, path: Path, capacity: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # really there, not a hole: touching one on a full disk would be a SIGBUS for the whole process
            os.posix_fallocate(descriptor, 0, capacity * _SLOT.size)
            self._map = mmap.mmap(descriptor, capacity * _SLOT.size)
        finally:
            os.close(descriptor)
        self._free = list(range(capacity - 1, -1, -1))

    def claim(self, request_id: bytes) -> int:
        if not self._free:
            raise OSError("no slot is free: too many records wait for the disk")
        index = self._free.pop()
        _SLOT.pack_into(self._map, index * _SLOT.size, request_id, 0, 0, 0)
        return index

    def update(self, index: int, request_id: bytes, prompt: int, cached: int, completion: int) -> None:
        _SLOT.pack_into(self._map, index * _SLOT.size, request_id, prompt, cached, completion)

    def release(self, index: int) -> None:
        _SLOT.pack_into(self._map, index * _SLOT.size, b"", 0, 0, 0)
        self._free.append(index)

    def close(self) -> None:
        self._map.close()


def read_slots(path: Path) -> dict[bytes, tuple[int, int, int]]:
    """Prompt, cached and completion tokens by request id, as a dead process left them."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    whole = data[: len(data) - len(data) % _SLOT.size]
    return {
        request_id: (prompt, cached, completion)
        for request_id, prompt, cached, completion in _SLOT.iter_unpack(whole)
        if request_id.strip(b"\0")
    }


class Journal:
    """The writing side. One per process; all methods are called from the event loop."""

    def __init__(self, root: Path, instance: str, capacity: int) -> None:
        self.directory = _new_directory(root, instance)
        self._lock = _held(self.directory / "lock")
        self.slots = SlotTable(self.directory / "slots", capacity)
        # only now is it visible to the shipper, which takes a directory with a free lock for a dead one
        visible = self.directory.with_name(self.directory.name.removeprefix("."))
        self.directory = self.directory.rename(visible)
        self._number = 0
        self._unwritten: deque[tuple[bytes, int | None]] = deque()
        self._retired: deque[int] = deque()
        self._torn = False
        self.dropped = 0  # refusals that neither the disk nor memory had room for
        self._new_segment()
        self._dirty = threading.Event()
        self._stopping = threading.Event()
        self._syncer = threading.Thread(target=self._sync_forever, name="journal-sync", daemon=True)
        self._syncer.start()

    @property
    def unwritten(self) -> int:
        """Records that the disk has not taken yet."""
        return len(self._unwritten)

    def bytes_on_disk(self) -> int:
        sizes = (path.stat().st_size for path in segments(self.directory))
        with contextlib.suppress(FileNotFoundError):  # the shipper deletes meanwhile
            return sum(sizes)
        return self._size

    def open(self, entry: Opened | Folded) -> None:
        """Note what a slot was claimed for before it is used; raises OSError when the disk does not take it."""
        self.retry_unwritten()
        self._write(encoded(entry))

    def settle(self, entry: Settled, slot: int | None) -> None:
        """Note how a request ended and free its slot. What the disk does not take now is tried again.

        A full disk must not fill the memory: of requests that were refused before any work, only so many wait.
        """
        if slot is None and len(self._unwritten) >= MAX_UNWRITTEN:
            self.dropped += 1
            return
        self._unwritten.append((encoded(entry), slot))
        self.retry_unwritten()

    def retry_unwritten(self) -> None:
        """Write what the disk has refused, oldest first, until it refuses again. Raises nothing."""
        while self._unwritten:
            settled, slot = self._unwritten[0]
            try:
                self._write(settled)
            except OSError as error:
                log.error("journal: %d records wait for the disk: %s", len(self._unwritten), error)
                return
            self._unwritten.popleft()
            if slot is not None:
                self.slots.release(slot)

    def close(self) -> None:
        """Sync and let go: from here on the shipper may adopt and remove the directory."""
        self.retry_unwritten()
        self._stopping.set()
        self._dirty.set()
        self._syncer.join()
        self._sync()  # what came while the thread was at its last one
        os.close(self._descriptor)
        self.slots.close()
        os.close(self._lock)

    def _write(self, record: bytes) -> None:
        if self._torn or self._size >= SEGMENT_BYTES or time.monotonic() - self._born > SEGMENT_AGE_S:
            self._rotate()
        written = os.write(self._descriptor, record)
        self._size += written
        self._torn = written != len(record)  # nothing behind a torn record is ever read: the next goes elsewhere
        if not self._dirty.is_set():
            self._dirty.set()
        if self._torn:
            raise OSError("the disk took only part of a record")

    def _rotate(self) -> None:
        if self._size == 0:
            self._born = time.monotonic()
            return
        old = self._descriptor
        self._new_segment()
        self._retired.append(old)  # the syncing thread closes it, once it is on the disk

    def _new_segment(self) -> None:
        path = self.directory / f"{self._number + 1:08d}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL
        self._descriptor = os.open(path, flags, 0o600)
        self._number += 1
        self._size = 0
        self._born = time.monotonic()

    def _sync_forever(self) -> None:
        while not self._stopping.is_set():
            self._dirty.wait()
            self._stopping.wait(SYNC_EVERY_S)
            self._dirty.clear()
            self._sync()

    def _sync(self) -> None:
        try:
            while self._retired:
                descriptor = self._retired.popleft()
                os.fdatasync(descriptor)
                os.close(descriptor)
            os.fdatasync(self._descriptor)
        except OSError as error:
            log.error("journal: fdatasync failed: %s", error)


def _new_directory(root: Path, instance: str) -> Path:
    """Hidden by a leading dot until it is complete."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in instance)
    path = root / f".{safe}-{int(time.time())}-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    return path


def _held(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def try_lock(path: Path) -> int | None:
    """Take a lock file if nobody holds it; the descriptor holds it until closed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def directories(root: Path) -> list[Path]:
    """Journals of all processes, dead or alive, oldest name first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    return []


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{SUFFIX}"))


def remove(directory: Path) -> None:
    """Delete a whole journal whose records have all been delivered; hidden first, so that no half of it is read."""
    hidden = directory.rename(directory.with_name(f".{directory.name}{_SHIPPED}"))
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(root: Path) -> None:
    """Finish removals that were cut short."""
    for hidden in root.glob(f".*{_SHIPPED}"):
        shutil.rmtree(hidden, ignore_errors=True)


class Record(msgspec.Struct, frozen=True):
    entry: Entry
    end: int  # offset of the byte after it


def read(path: Path, offset: int = 0) -> Iterator[Record]:
    """Whole records from `offset` on; stops quietly at the first that is torn or not there yet."""
    with path.open("rb") as file:
        file.seek(offset)
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            payload = file.read(length) if length <= _MAX_RECORD else b""
            if len(payload) < length or zlib.crc32(payload) != checksum:
                return
            offset += _HEADER.size + length
            try:
                entry = _decoder.decode(payload)
            except msgspec.DecodeError:
                log.error("journal: %s holds a record before %d that cannot be read", path, offset)
                continue
            yield Record(entry, offset)
