"""The timeline is arithmetic on stamps: it invents nothing, clamps nothing and loses nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.port import PHASES
from serving.telemetry.timeline import Anchor, EngineReport, FailedAttempt, Stamps, build, union
from tests.serving.fakes import ORDINARY_PHASES

BOOT = "this-machine"
ANCHOR = Anchor(wall_ns=1_800_000_000_000_000_000, mono_ns=1_000_000)
gaps = st.lists(st.integers(1, 10_000_000), min_size=16, max_size=16)


def ordinary(steps: list[int], offset: int = 0, boot: str = BOOT) -> tuple[Stamps, EngineReport]:
    """A request in which everything happens, in order; the engine's clock is `offset` ahead."""
    at, times = 1_000_000, []
    for step in steps:
        at += step
        times.append(at)
    names = ["RECEIVED", "TOKENIZED", "QUEUED", "SCHEDULED", "CHUNK", "FIRST_TOKEN", "FINISHED"]
    events: list[Any] = [(name, t + offset, {}) for name, t in zip(names, times[5:12], strict=True)]
    stamps = Stamps(
        received=times[0],
        authenticated=times[1],
        body=times[2],
        admitted=times[3],
        routed=times[4],
        posted=times[4] + 1,
        first_chunk=times[12],
        first_sent=times[12],
        last_chunk=times[13],
        ended=times[13],
        delivered=times[14],
        settled=times[15],
    )
    anchor = Anchor(wall_ns=ANCHOR.wall_ns, mono_ns=ANCHOR.mono_ns + offset)
    return stamps, EngineReport(boot_id=boot, anchor=anchor, events=events)


@given(gaps)
def test_an_ordinary_request_is_covered_without_a_gap(steps: list[int]) -> None:
    stamps, report = ordinary(steps)
    line = build(stamps, report, anchor=ANCHOR, boot=BOOT)
    assert line.clock == "shared"
    assert line.unattributed == 0
    assert [p.name for p in line.phases] == ORDINARY_PHASES
    assert sum(p.end - p.start for p in line.phases) == stamps.settled - stamps.received


@given(gaps, st.integers(-(10**15), 10**15))
def test_another_machines_clock_is_mapped_by_the_anchors(steps: list[int], offset: int) -> None:
    here = build(*ordinary(steps), anchor=ANCHOR, boot=BOOT)
    there = build(*ordinary(steps, offset, "another-machine"), anchor=ANCHOR, boot=BOOT)
    assert there.clock == "wall"
    assert there.phases == here.phases


@given(gaps, st.sampled_from([-3_600_000_000_000, 3_600_000_000_000]))
def test_a_wall_clock_that_stepped_drops_the_engines_phases(steps: list[int], step: int) -> None:
    stamps, report = ordinary(steps, boot="another-machine")
    assert report.anchor is not None
    report.anchor = Anchor(report.anchor.wall_ns + step, report.anchor.mono_ns)
    line = build(stamps, report, anchor=ANCHOR, boot=BOOT)
    assert line.clock == ""
    assert "engine" in {p.name for p in line.phases}
    assert line.unattributed == 0


@given(gaps, st.integers(0, 14), st.integers(1, 10**9))
def test_a_delay_moves_the_phase_it_is_in_and_only_that(steps: list[int], where: int, delay: int) -> None:
    before = build(*ordinary(steps), anchor=ANCHOR, boot=BOOT)
    longer = list(steps)
    longer[where + 1] += delay
    after = build(*ordinary(longer), anchor=ANCHOR, boot=BOOT)
    before_totals, after_totals = before.totals(), after.totals()
    grown = {
        name: after_totals.get(name, 0) - before_totals.get(name, 0)
        for name in PHASES
        if after_totals.get(name, 0) != before_totals.get(name, 0)
    }
    assert sum(grown.values()) == delay
    assert len(grown) == 1


@given(gaps, st.integers(0, 7))
def test_a_request_cut_at_any_point_makes_sense(steps: list[int], known: int) -> None:
    """Decode ends at the last chunk that arrived; phases that did not begin are not there."""
    stamps, report = ordinary(steps)
    report.events = report.events[:known]
    stamps.delivered = 0
    line = build(stamps, report, anchor=ANCHOR, boot=BOOT)
    names = [p.name for p in line.phases]
    assert len(names) == len(set(names))
    assert set(names) <= set(PHASES)
    assert "deliver" not in names
    for phase in line.phases:
        if phase.name in ("decode", "prefill") and known < 7:
            assert phase.end == stamps.last_chunk or phase.name == "prefill"
    assert 0 <= line.unattributed <= stamps.settled - stamps.received


def test_a_refused_request_has_only_what_happened() -> None:
    stamps = Stamps(received=10, authenticated=20, body=30, delivered=45, settled=50)
    line = build(stamps, None, anchor=ANCHOR, boot=BOOT)
    assert [(p.name, p.start, p.end) for p in line.phases] == [
        ("auth", 10, 20),
        ("receive", 20, 30),
        ("deliver", 30, 45),
        ("settle", 45, 50),
    ]
    assert line.unattributed == 0


def test_failed_attempts_are_seen_as_engine_time_between_choices() -> None:
    stamps = Stamps(
        received=0,
        authenticated=1,
        body=2,
        admitted=3,
        routed=50,
        posted=51,
        last_chunk=90,
        ended=90,
        delivered=95,
        settled=96,
    )
    failed = [FailedAttempt("r1", "engine_unreachable", 5, 40)]
    line = build(stamps, None, anchor=ANCHOR, boot=BOOT, failed=failed)
    assert [(p.name, p.start, p.end) for p in line.phases if p.name in ("routing", "engine")] == [
        ("routing", 3, 5),
        ("engine", 5, 40),
        ("routing", 40, 50),
        ("engine", 51, 90),
    ]
    assert line.unattributed == 0


spans = st.lists(st.tuples(st.integers(-50, 150), st.integers(-50, 150)), max_size=12)


@given(spans)
def test_union_counts_each_instant_once(parts: list[tuple[int, int]]) -> None:
    expected = sum(any(start <= t < end for start, end in parts) for t in range(100))
    assert union(parts, (0, 100)) == expected


def test_reports_are_merged_without_doubling() -> None:
    early = EngineReport(events=[("RECEIVED", 1, {}), ("FIRST_TOKEN", 5, {})])
    late = EngineReport(events=[("FIRST_TOKEN", 5, {}), ("FINISHED", 9, {})], preemptions=1)
    merged = late.merged(early)
    assert [name for name, *_ in merged.events] == ["RECEIVED", "FIRST_TOKEN", "FINISHED"]
    assert merged.preemptions == 1
