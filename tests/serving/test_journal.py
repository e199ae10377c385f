"""The journal outlives its process, and the shipper delivers each record, whatever happens in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
import pytest

from serving import journal
from serving.journal import Journal, Opened
from serving.port import RecordRefused, RequestContent, RequestDetail, RequestRecord, Settled, UsageRecord
from serving.shipper import REFUSED, Shipper
from tests.serving.conftest import chat
from tests.serving.fakes import PRICE, PROMPT_TOKENS, WORDS, Stack

ROOT = Path(__file__).parents[2]


def settled(request_id: str, tokens: int = 3) -> Settled:
    return Settled(
        usage=UsageRecord(
            id=request_id,
            started_at=1.0,
            tenant_id="t",
            key_id="k",
            model="m",
            outcome="ok",
            completion_tokens=tokens,
        ),
        record=RequestRecord(
            id=request_id,
            started_at=1.0,
            tenant_id="t",
            key_id="k",
            source="api",
            endpoint="chat",
            model="m",
            stream=True,
            outcome="ok",
            status=200,
        ),
        detail=RequestDetail(id=request_id, started_at=1.0),
    )


def opened(request_id: str, slot: int = 0) -> Opened:
    return Opened(
        id=request_id,
        slot=slot,
        started_at=1.0,
        tenant_id="t",
        key_id="k",
        source="api",
        endpoint="chat",
        model="m",
        stream=True,
        prompt_estimate=1,
        price=PRICE,
        deployment_id="d",
        replica_id="r",
        device="cpu",
        end_user="",
        client_request_id="",
        trace_id="",
        gateway="g",
        gateway_version="1",
        snapshot_version=1,
        engine_version="1",
    )


def new_id() -> str:
    return str(uuid.uuid4())


class Ledger:
    """An idempotent sink, as the console's is; fails when told to."""

    def __init__(self) -> None:
        self.rows: dict[str, Settled] = {}
        self.writes = 0
        self.failing = False

    def write(self, batch: Sequence[Settled]) -> None:
        self.writes += 1
        if self.failing:
            raise ConnectionError("the database is away")
        for entry in batch:
            self.rows.setdefault(entry.record.id, entry)


def run_journal(root: Path, count: int) -> list[str]:
    """A process that settles `count` requests and closes in order."""
    writer = Journal(root, "test-1", 8)
    ids = [new_id() for _ in range(count)]
    for request_id in ids:
        slot = writer.slots.claim(uuid.UUID(request_id).bytes)
        writer.open(opened(request_id, slot))
        writer.settle(settled(request_id), slot)
    writer.close()
    return ids


def test_a_closed_journal_is_delivered_and_removed(root: Path) -> None:
    ids = run_journal(root, 3)
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    assert shipper.run_once() == 3
    assert list(ledger.rows) == ids
    assert journal.directories(root) == []
    assert shipper.run_once() == 0
    shipper.close()


def test_a_live_journal_is_followed(root: Path) -> None:
    writer, ledger = Journal(root, "test-1", 8), Ledger()
    shipper = Shipper(root, ledger)
    for number in range(1, 4):
        writer.settle(settled(new_id()), None)
        assert shipper.run_once() == 1
        assert len(ledger.rows) == number
    writer.close()
    shipper.run_once()
    shipper.close()
    assert journal.directories(root) == []


def test_a_live_journal_is_never_taken_for_a_dead_one(root: Path) -> None:
    writer, ledger = Journal(root, "test-1", 8), Ledger()
    request_id = new_id()
    slot = writer.slots.claim(uuid.UUID(request_id).bytes)
    writer.open(opened(request_id, slot))
    shipper = Shipper(root, ledger)
    for _ in range(3):
        assert shipper.run_once() == 0
    writer.settle(settled(request_id), slot)
    assert shipper.run_once() == 1
    assert ledger.rows[request_id].record.outcome == "ok"
    writer.close()
    shipper.close()


def test_a_failing_sink_loses_nothing(root: Path) -> None:
    ids = run_journal(root, 5)
    ledger = Ledger()
    ledger.failing = True
    shipper = Shipper(root, ledger)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            shipper.run_once()
    ledger.failing = False
    assert shipper.run_once() == 5
    assert list(ledger.rows) == ids
    shipper.close()


def test_a_record_that_is_refused_for_good_does_not_hold_up_the_others(root: Path) -> None:
    ids = run_journal(root, 7)
    bad = {ids[2], ids[6]}

    class Picky(Ledger):
        def write(self, batch: Sequence[Settled]) -> None:
            if bad & {entry.record.id for entry in batch}:
                raise RecordRefused("DataError")
            super().write(batch)

    ledger = Picky()
    shipper = Shipper(root, ledger)
    assert shipper.run_once() == 7
    assert set(ledger.rows) == set(ids) - bad
    kept = [record.entry for record in journal.read(root / REFUSED)]
    assert {entry.record.id for entry in kept if isinstance(entry, Settled)} == bad
    assert journal.directories(root) == []
    shipper.close()


def test_words_that_are_refused_do_not_take_their_record_along(root: Path) -> None:
    class Wordless(Ledger):
        def write(self, batch: Sequence[Settled]) -> None:
            if any(entry.content for entry in batch):
                raise RecordRefused("DataError")
            super().write(batch)

    writer, request_id = Journal(root, "test-1", 8), new_id()
    entry = settled(request_id)
    words = RequestContent(id=request_id, started_at=entry.record.started_at, tenant_id="t")
    writer.settle(msgspec.structs.replace(entry, content=words), None)
    writer.close()
    ledger = Wordless()
    shipper = Shipper(root, ledger)
    assert shipper.run_once() == 1
    assert list(ledger.rows) == [request_id] and not (root / REFUSED).exists()
    shipper.close()


def test_only_one_shipper_works(root: Path) -> None:
    run_journal(root, 2)
    first, second, ledger = Shipper(root, Ledger()), Shipper(root, Ledger()), Ledger()
    assert first.run_once() == 2
    run_journal(root, 1)
    assert second.run_once() == 0
    first.close()
    third = Shipper(root, ledger)
    assert third.run_once() == 1
    third.close()


def test_a_segment_stays_while_a_request_that_it_opened_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1)
    writer, ledger = Journal(root, "test-1", 8), Ledger()
    shipper = Shipper(root, ledger)
    long_one = new_id()
    slot = writer.slots.claim(uuid.UUID(long_one).bytes)
    writer.open(opened(long_one, slot))
    for _ in range(5):
        writer.settle(settled(new_id()), None)
    shipper.run_once()
    assert [p.name for p in journal.segments(writer.directory)][0] == "00000001.journal"
    shipper.close()
    # a fresh shipper learns again what is open, and does not deliver twice
    again = Shipper(root, ledger)
    assert again.run_once() == 0
    writer.settle(settled(long_one), slot)
    assert again.run_once() == 1
    assert len(journal.segments(writer.directory)) == 1
    writer.close()
    again.run_once()
    again.close()
    assert len(ledger.rows) == 6


def test_a_disk_that_refuses_keeps_the_record_and_its_slot(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Journal(root, "test-1", 1)
    request_id = new_id()
    slot = writer.slots.claim(uuid.UUID(request_id).bytes)
    real_write = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def half(descriptor: int, data: bytes) -> int:
        return real_write(descriptor, data[: len(data) // 2])

    for broken in (full, half):
        monkeypatch.setattr(os, "write", broken)
        writer.settle(settled(request_id), slot) if broken is full else writer.retry_unwritten()
        assert writer.unwritten == 1
    monkeypatch.undo()
    assert list(journal.read_slots(writer.directory / "slots")) == [uuid.UUID(request_id).bytes]
    writer.retry_unwritten()
    assert writer.unwritten == 0
    writer.close()
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    assert shipper.run_once() == 1  # after a segment with a torn tail
    shipper.close()


def test_nothing_is_written_behind_a_torn_record(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes half a record and then no new file: what comes later must not land behind that half."""
    writer = Journal(root, "test-1", 8)
    real_write, real_open = os.write, os.open

    def full(path: os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[: len(data) // 2]))
    monkeypatch.setattr(os, "open", full)
    ids = [new_id(), new_id()]
    writer.settle(settled(ids[0]), None)
    monkeypatch.setattr(os, "write", real_write)
    writer.retry_unwritten()
    assert writer.unwritten == 1
    monkeypatch.setattr(os, "open", real_open)
    writer.settle(settled(ids[1]), None)
    writer.close()
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    shipper.run_once()
    shipper.close()
    assert list(ledger.rows) == ids


def test_a_full_disk_does_not_fill_the_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Journal(root, "test-1", 2)
    request_id = new_id()
    slot = writer.slots.claim(uuid.UUID(request_id).bytes)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "MAX_UNWRITTEN", 5)
    monkeypatch.setattr(os, "write", full)
    for _ in range(20):
        writer.settle(settled(new_id()), None)
    writer.settle(settled(request_id), slot)
    assert (writer.unwritten, writer.dropped) == (6, 15)
    monkeypatch.undo()
    writer.close()
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    assert shipper.run_once() == 6
    assert request_id in ledger.rows  # what was dispatched is never dropped
    shipper.close()


def test_a_full_disk_is_relieved_although_it_takes_no_mark(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: the shipper could not write its cursor to the full disk, so it deleted nothing, so the disk stayed full."""
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1)
    writer = Journal(root, "test-1", 8)
    ids = [new_id() for _ in range(4)]
    for request_id in ids:
        writer.settle(settled(request_id), None)
    real_write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    assert shipper.run_once() == 4
    assert len(journal.segments(writer.directory)) == 1
    monkeypatch.setattr(Path, "write_bytes", real_write)
    assert shipper.run_once() == 0
    shipper.close()
    again = Shipper(root, ledger)
    assert again.run_once() == 0  # the mark was made up for
    again.close()
    writer.close()
    assert list(ledger.rows) == ids


def test_the_slots_have_their_place_on_the_disk(root: Path) -> None:
    writer = Journal(root, "test-1", 5000)
    stat = (writer.directory / "slots").stat()
    assert stat.st_blocks * 512 >= stat.st_size >= 5000 * 16
    writer.close()


VICTIM = """
import sys, uuid
from pathlib import Path
from serving.journal import Journal
from tests.serving.test_journal import opened, settled, new_id
writer = Journal(Path(sys.argv[1]), "victim-1", 64)
done = 0
while True:
    request_id = new_id()
    key = uuid.UUID(request_id).bytes
    slot = writer.slots.claim(key)
    writer.open(opened(request_id, slot))
    for tokens in range(1, 4):
        writer.slots.update(slot, key, 10, 4, tokens)
        print("sent", request_id, tokens, flush=True)
    done += 1
    if done % 3 or done > 100:
        writer.settle(settled(request_id), slot)
        print("settled", request_id, flush=True)
"""


def test_kill_9_loses_nothing_and_bills_at_least_what_was_sent(root: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", VICTIM, str(root)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    lines += [line.split() for line in rest.splitlines()]
    sent: dict[str, int] = {}
    for line in lines:
        if len(line) == 3 and line[0] == "sent":
            sent[line[1]] = int(line[2])
    finished = {line[1] for line in lines if line[0] == "settled" and len(line) == 2}
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    shipper.run_once()
    shipper.close()
    assert set(sent) <= set(ledger.rows)
    for request_id, tokens in sent.items():
        entry = ledger.rows[request_id]
        assert entry.usage is not None
        assert entry.usage.completion_tokens >= tokens
        if request_id in finished:
            assert entry.record.outcome == "ok"
        elif entry.record.outcome == "gateway_lost":
            assert (entry.usage.prompt_tokens, entry.usage.cached_tokens) == (10, 4)
            assert entry.usage.price_version == 7
    assert any(e.record.outcome == "gateway_lost" for e in ledger.rows.values())
    assert journal.directories(root) == []


def test_adoption_that_is_cut_short_is_done_again(root: Path) -> None:
    """The sink took the lost requests, but the shipper died before it removed the journal."""
    code = "\n".join(
        (
            "import sys, os, uuid",
            "from pathlib import Path",
            "from serving.journal import Journal",
            "from tests.serving.test_journal import opened",
            "writer = Journal(Path(sys.argv[1]), 'victim-2', 4)",
            "key = uuid.UUID(int=5)",
            "writer.open(opened(str(key), writer.slots.claim(key.bytes)))",
            "os._exit(9)",
        )
    )
    subprocess.run([sys.executable, "-c", code, str(root)], cwd=ROOT, check=False)
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    remove, journal.remove = journal.remove, lambda _: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            shipper.run_once()
    finally:
        journal.remove = remove
    shipper.close()
    again = Shipper(root, ledger)
    assert again.run_once() == 1
    again.close()
    assert list(ledger.rows) == [str(uuid.UUID(int=5))]
    assert journal.directories(root) == []


def test_the_shipper_backs_off_and_delivers_on_its_way_out(root: Path) -> None:
    ids = run_journal(root, 3)
    ledger, stop = Ledger(), threading.Event()
    ledger.failing = True
    shipper = Shipper(root, ledger)
    thread = threading.Thread(target=shipper.run, args=(stop,))
    thread.start()
    while ledger.writes < 2:
        stop.wait(0.01)
    ledger.failing = False
    stop.set()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert list(ledger.rows) == ids


async def test_from_a_request_to_the_ledger(stack: Stack, client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=chat())
    await stack.idle()
    ledger = Ledger()
    shipper = Shipper(stack.settings.journal_root, ledger)
    assert shipper.run_once() == 1
    shipper.close()
    entry = ledger.rows[response.headers["x-request-id"]]
    assert entry.usage is not None
    assert (entry.usage.prompt_tokens, entry.usage.completion_tokens) == (PROMPT_TOKENS, len(WORDS))
    text = (await client.get("/metrics")).text
    assert "fanlight_journal_unshipped_bytes 0.0" in text


def test_the_journal_is_nobody_elses_business(root: Path) -> None:
    writer = Journal(root / "journal", "test-1", 2)
    for path in [root / "journal", writer.directory, *writer.directory.iterdir()]:
        assert path.stat().st_mode & 0o077 == 0
    writer.close()
