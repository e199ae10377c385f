"""Torn tails, failing sinks and restarted shippers: every whole record arrives, in order, and none is made up."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from serving import journal
from serving.journal import Journal
from serving.port import Settled
from serving.shipper import Shipper
from tests.serving.test_journal import opened, settled

ids = st.lists(st.uuids(version=4).map(str), min_size=1, max_size=8, unique=True)


@given(ids, st.data())
@hypothesis_settings(max_examples=60, deadline=None)
def test_a_torn_or_damaged_tail_costs_only_itself(requests: list[str], data: st.DataObject) -> None:
    frames = [journal.encoded(settled(request)) for request in requests]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole)))
    junk = data.draw(st.binary(max_size=12))
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(whole[:cut] + junk)
        got = [r.entry.record.id for r in journal.read(Path(file.name)) if isinstance(r.entry, Settled)]
    complete, end = 0, 0
    for frame in frames:
        end += len(frame)
        complete += end <= cut
    # junk may happen to complete the record that was cut, never to add one
    assert got in (requests[:complete], requests[: complete + 1])


class MoodySink:
    """Fails as the dice say, after writing nothing."""

    def __init__(self, moods: list[bool]) -> None:
        self.moods = moods
        self.order: list[str] = []
        self.outcomes: dict[str, str] = {}

    def write(self, batch: Sequence[Settled]) -> None:
        if self.moods and self.moods.pop():
            raise ConnectionError
        for entry in batch:
            if entry.record.id not in self.outcomes:
                self.order.append(entry.record.id)
            self.outcomes.setdefault(entry.record.id, entry.record.outcome)


steps = st.lists(st.sampled_from(["open", "settle", "ship", "restart", "rotate"]), max_size=40)


@given(steps, st.lists(st.booleans(), max_size=10))
@hypothesis_settings(max_examples=60, deadline=None)
def test_every_request_arrives_exactly_once(plan: list[str], moods: list[bool]) -> None:
    """Opened and settled ones as settled; those never settled as lost, once the gateway is gone."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        root = Path(folder)
        sink = MoodySink(moods)
        writer, shipper = Journal(root, "test-1", 64), Shipper(root, sink)
        running: list[tuple[str, int]] = []
        done: list[str] = []
        for step in plan:
            if step == "open":
                request = str(uuid.uuid4())
                slot = writer.slots.claim(uuid.UUID(request).bytes)
                writer.open(opened(request, slot))
                running.append((request, slot))
            elif step == "settle" and running:
                request, slot = running.pop(0)
                writer.settle(settled(request), slot)
                done.append(request)
            elif step == "ship":
                attempt(shipper)
                assert set(sink.order) <= set(done)
            elif step == "restart":
                shipper.close()
                shipper = Shipper(root, sink)
            elif step == "rotate":
                writer._rotate()
        writer.close()
        while journal.directories(root):
            attempt(shipper)
        shipper.close()
        assert sink.order[: len(done)] == done
        assert {r for r, outcome in sink.outcomes.items() if outcome == "ok"} == set(done)
        assert {r for r, outcome in sink.outcomes.items() if outcome != "ok"} == {r for r, _ in running}


def attempt(shipper: Shipper) -> None:
    try:
        shipper.run_once()
    except ConnectionError:
        pass
