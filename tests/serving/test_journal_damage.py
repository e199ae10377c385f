"""Journals that a disk or a power cut has damaged: what is whole is delivered once, what is skipped is told."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import journal
from serving.journal import Journal
from serving.shipper import Shipper
from tests.serving.test_journal import Ledger, new_id, opened, settled

REQUESTS = 4


def written(root: Path, *, a_segment_each: bool = False) -> tuple[list[str], list[int], list[Path]]:
    """A dead journal of requests that were opened and settled: ids, ends of records in order, segments."""
    writer = Journal(root, "test-1", 8)
    ids = [new_id() for _ in range(REQUESTS)]
    for request_id in ids:
        slot = writer.slots.claim(uuid.UUID(request_id).bytes)
        writer.open(opened(request_id, slot))
        writer.settle(settled(request_id), slot)
        if a_segment_each:
            writer._rotate()
    writer.close()
    paths = journal.segments(writer.directory)
    return ids, [record.end for record in journal.read(paths[0])], paths


def shipped(root: Path) -> dict[str, str]:
    """Outcomes by id."""
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    shipper.run_once()
    shipper.close()
    return {request_id: str(entry.record.outcome) for request_id, entry in ledger.rows.items()}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_power_cut_at_any_byte_keeps_every_whole_record(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ids, ends, (path,) = written(Path(directory))
        length = data.draw(st.integers(0, ends[-1]))
        with path.open("r+b") as file:
            file.truncate(length)
        whole = sum(end <= length for end in ends)  # records alternate: opened, settled
        known = dict.fromkeys(ids[: whole // 2], "ok")
        if whole % 2:
            known[ids[whole // 2]] = "gateway_lost"
        assert shipped(Path(directory)) == known


@pytest.mark.parametrize("damaged", range(REQUESTS))
def test_a_flipped_bit_costs_no_other_segment_and_is_told(
    root: Path, damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    ids, _, paths = written(root, a_segment_each=True)
    size = paths[damaged].stat().st_size
    with paths[damaged].open("r+b") as file:
        file.seek(20)
        byte = file.read(1)[0]
        file.seek(20)
        file.write(bytes([byte ^ 0x10]))
    assert shipped(root) == {request_id: "ok" for number, request_id in enumerate(ids) if number != damaged}
    (told,) = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert f"{size} bytes from byte 0 on are skipped" in told and paths[damaged].name in told


def test_a_torn_end_of_the_last_segment_is_told(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids, ends, (path,) = written(root)
    with path.open("r+b") as file:
        file.truncate(ends[-1] - 1)
    assert shipped(root) == {**dict.fromkeys(ids[:-1], "ok"), ids[-1]: "gateway_lost"}
    assert f"{ends[-1] - 1 - ends[-2]} bytes from byte {ends[-2]} on are skipped" in caplog.text


def test_one_sync_covers_all_records_of_its_moment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests end meanwhile, syncs are SYNC_EVERY_S apart at least, and the last covers all."""
    sizes: list[int] = []
    real = os.fdatasync

    def counted(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", counted)
    writer = Journal(root, "test-1", 8)
    began = time.monotonic()
    for _ in range(2_000):
        slot = writer.slots.claim(uuid.uuid4().bytes)
        writer.settle(settled(new_id()), slot)
    writer.close()
    assert 1 <= len(sizes) <= (time.monotonic() - began) / journal.SYNC_EVERY_S + 3
    assert sizes[-1] == writer.directory.joinpath("00000001.journal").stat().st_size


def test_a_record_written_during_the_last_sync_is_synced_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncing, go_on = threading.Event(), threading.Event()
    synced: list[int] = []
    real = os.fdatasync

    def held(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        syncing.set()
        assert go_on.wait(5)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", held)
    writer = Journal(root, "test-1", 8)
    writer.settle(settled(new_id()), None)
    assert syncing.wait(5)
    writer.settle(settled(new_id()), None)
    writer._stopping.set()
    go_on.set()
    writer.close()
    assert synced[-1] == writer.directory.joinpath("00000001.journal").stat().st_size
