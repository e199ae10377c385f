"""Durations that an engine tells, laid out on the clock of the gateway: consistent, and never before the request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.telemetry.durations import Durations, report_of
from serving.telemetry.timeline import Anchor, Stamps, build

MS = 1_000_000
ms = st.floats(0, 10_000)
anything = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@given(ms, ms, ms, st.floats(0, 1000))
def test_phases_are_as_long_as_told_and_cover_the_request(
    queue: float, prefill: float, decode: float, way: float
) -> None:
    posted = 10**12
    first = posted + round(queue * MS) + round(prefill * MS) + round(way * MS)
    ended = first + round(decode * MS)
    report = report_of(Durations(queue, prefill, decode), posted, first, ended, 20, 16)
    assert report is not None
    stamps = Stamps(
        received=posted - 5, authenticated=posted - 4, body=posted - 3, admitted=posted - 2, routed=posted - 1,
        posted=posted, first_chunk=first, first_sent=first, last_chunk=ended, ended=ended, delivered=ended,
        settled=ended,
    )  # fmt: skip
    line = build(stamps, report, anchor=Anchor(0, 0), boot="here")
    spent = line.totals()
    assert line.clock == "durations"
    assert (spent["engine_queue"], spent["prefill"], spent["decode"]) == (
        round(queue * MS),
        round(prefill * MS),
        round(decode * MS),
    )
    assert line.unattributed == 0
    assert "tokenize" not in spent  # it is not told, so it is not shown as nothing
    prefilled = next(phase for phase in line.phases if phase.name == "prefill")
    assert prefilled.args["cached_tokens"] == 16
    assert report.computed_tokens == 4


@given(anything, anything, anything, st.integers(0, 10**15), st.integers(0, 10**15), st.integers(0, 10**12))
def test_nonsense_is_left_out(
    queue: float | None, prefill: float | None, decode: float | None, posted: int, first: int, later: int
) -> None:
    report = report_of(Durations(queue, prefill, decode), posted, first, first + later, 1, 0)
    if report is not None:
        times = [at for _name, at, _args in report.events]
        assert times == sorted(times) and times[0] >= posted > 0 and times[-1] <= first + later
