"""Floods of refusals: few records, and no refusal uncounted, whoever dies and whatever the disk says."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import folding, journal
from serving.folding import FOLD_ABOVE, Folding
from serving.journal import Folded, Journal
from serving.port import Settled
from serving.shipper import Shipper
from tests.serving.conftest import chat
from tests.serving.fakes import Stack
from tests.serving.test_journal import Ledger, new_id
from tests.serving.test_journal import settled as finished

START = 1_700_000_040.0  # a minute begins


def refusal(key: str = "k", code: str = "c", at: float = START) -> Settled:
    entry, request_id = finished(new_id(), 0), new_id()
    assert entry.usage is not None
    same = {"id": request_id, "started_at": at, "key_id": key, "outcome": "rejected"}
    return Settled(
        usage=msgspec.structs.replace(entry.usage, **same),
        record=msgspec.structs.replace(entry.record, status=429, code=code, **same),
        detail=msgspec.structs.replace(entry.detail, id=request_id, started_at=at),
    )


def shipped(root: Path) -> list[Settled]:
    ledger = Ledger()
    shipper = Shipper(root, ledger)
    shipper.run_once()
    shipper.close()
    return list(ledger.rows.values())


def told(entries: list[Settled]) -> list[int]:
    """How many requests each entry stands for, alike in both of its records."""
    for entry in entries:
        assert entry.usage is not None and entry.usage.requests == entry.record.requests
        assert entry.usage.outcome == entry.record.outcome == "rejected"
    return [entry.record.requests for entry in entries]


def test_what_is_above_ten_a_second_becomes_one_record(root: Path) -> None:
    writer = Journal(root, "test-1", 8)
    folds = Folding(writer)
    for second in range(3):
        for _ in range(FOLD_ABOVE + 5):
            folds.note(refusal(at=START + second), second)
    folds.end_minute(START + 59.9)
    assert len(list(journal.read(journal.segments(writer.directory)[0]))) == 3 * FOLD_ABOVE + 1  # and it is open
    folds.end_minute(START + 60)
    writer.close()
    assert sorted(told(shipped(root))) == [1] * 3 * FOLD_ABOVE + [15]


def test_ten_a_second_are_ten_records(root: Path) -> None:
    writer = Journal(root, "test-1", 8)
    folds = Folding(writer)
    for number in range(5 * FOLD_ABOVE):
        folds.note(refusal(), number // FOLD_ABOVE)
    folds.close()
    writer.close()
    assert told(shipped(root)) == [1] * 5 * FOLD_ABOVE


Flood = list[tuple[str, str, int]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 150)), max_size=120),
    st.booleans(),
    st.integers(0, 4),
)
def test_no_refusal_is_uncounted(flood: Flood, killed: bool, room: int) -> None:
    """Closed in order or killed, with room for all folds or for few: the sum is what came, by key and reason."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "FOLD_ABOVE", 1)
        root = Path(directory)
        writer = Journal(root / "live", "test-1", room or 1)
        patch.setattr(folding, "MAX_FOLDS", room)
        folds = Folding(writer)
        for key, code, second in sorted(flood, key=lambda each: each[2]):
            folds.end_minute(START + second)
            folds.note(refusal(key, code, START + second), second)
        if killed:
            shutil.copytree(root / "live", root / "killed")
        folds.close()
        writer.close()
        counted: Counter[tuple[str | None, str]] = Counter()
        for entry in shipped(root / ("killed" if killed else "live")):
            counted[entry.record.key_id, entry.record.code] += told([entry])[0]
        assert counted == Counter((key, code) for key, code, _ in flood)


def test_a_disk_that_refuses_a_fold_holds_no_slot_for_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Journal(root, "test-1", 1)
    folds = Folding(writer)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(FOLD_ABOVE + 2):
        folds.note(refusal(), 1)
    assert journal.read_slots(writer.directory / "slots") == {}
    monkeypatch.setattr(os, "write", real)
    folds.close()
    writer.close()
    assert told(shipped(root)) == [1] * (FOLD_ABOVE + 2)


async def test_refusals_of_the_gateway_are_folded_and_outlive_it(
    root: Path, stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "FOLD_ABOVE", 2)
    for number in range(20):
        answer = await client.post("/v1/chat/completions", json=chat(nonsense=number))
        assert answer.status_code == 400
    answer = await client.post("/v1/chat/completions", json=chat())
    await stack.idle()
    assert any(isinstance(entry, Folded) for entry in stack.entries())
    shutil.copytree(stack.settings.journal_root, root / "killed")
    await stack.gateway.shutdown()
    for path in (stack.settings.journal_root, root / "killed"):
        entries = {entry.record.id: entry for entry in shipped(path)}
        assert entries.pop(answer.headers["x-request-id"]).record.outcome == "ok"
        assert sum(told(list(entries.values()))) == 20 > len(entries)
        assert {entry.record.code for entry in entries.values()} == {"unknown_parameter"}
