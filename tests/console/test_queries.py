"""Reads of telemetry against a real PostgreSQL: exact, scoped, paged, bounded."""

from __future__ import annotations

import statistics
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from console.billing.queries import usage_by_key, usage_by_model
from console.telemetry import filters, names, queries, trace, windows
from console.telemetry.filters import BadFilter
from console.telemetry.route_figures import measured
from console.telemetry.scope import Scope, scope_of
from serving.folding import of_many
from tests.e2e.world import World, deliver, settled
from tests.e2e.world import world as world

EVERYTHING = Scope(None)


def hour() -> windows.Window:
    return windows.latest("1h", datetime.now(UTC) + timedelta(seconds=2))


def test_percentiles_are_exact(world: World) -> None:
    values = [1000 * (n * 37 % 200 + 1) for n in range(200)]
    deliver(*(settled(world.aurora, world.key, ttft_us=v, age=1 + n) for n, v in enumerate(values)))
    total = queries.traffic(EVERYTHING, hour()).total
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert total.requests == 200
    assert total.ttft == (pytest.approx(statistics.median(values)), pytest.approx(cuts[98]))


def test_bars_add_up_to_the_whole(world: World) -> None:
    outcomes = ["ok", "ok", "cancelled", "rejected", "error", "timeout", "slow_reader", "gateway_lost"]
    deliver(*(settled(world.aurora, world.key, outcome=o, age=60 * n + 5) for n, o in enumerate(outcomes * 3)))
    told = queries.traffic(EVERYTHING, hour())
    for name in ("requests", "ok", "cancelled", "rejected", "failed", "prompt_tokens", "completion_tokens"):
        assert sum(getattr(bar, name) for bar in told.slices) == getattr(told.total, name), name
    assert (told.total.ok, told.total.cancelled, told.total.rejected, told.total.failed) == (6, 6, 3, 9)
    assert len(told.slices) == 60


def test_only_the_newest_rows_count_when_there_are_too_many(world: World) -> None:
    deliver(*(settled(world.aurora, world.key, ttft_us=1000 * (n + 1), age=n + 1) for n in range(30)))
    told = queries.traffic(EVERYTHING, hour(), cap=10)
    assert told.capped and told.total.requests == 10
    assert told.total.ttft[0] == pytest.approx(5500)


def test_a_record_of_many_refusals_counts_as_many(world: World) -> None:
    refused = settled(world.aurora, world.key, outcome="rejected", status=503, code="queue_full", attempts=0)
    deliver(settled(world.aurora, world.key), of_many(refused, 99))
    told = queries.traffic(EVERYTHING, hour(), cap=3)
    assert (told.total.requests, told.total.ok, told.total.rejected, told.capped) == (100, 1, 99, False)
    assert told.total.rejected_share == 0.99
    assert queries.rate(EVERYTHING, datetime.now(UTC) + timedelta(seconds=2)).seen == 100
    found = queries.summary(EVERYTHING, hour(), filters.parse("status:rejected"))
    assert (found.matching, found.total) == (99, 100)
    assert [(g.value, g.requests, g.share) for g in queries.groups(EVERYTHING, hour(), (), "outcome")] == [
        ("rejected", 99, 0.99),
        ("ok", 1, 0.01),
    ]
    assert measured("smollm2", hour(), None, None).availability == (100, 99)
    assert usage_by_key(world.aurora.id)[world.key.id].requests == 100
    assert [row["n"] for row in usage_by_model(world.aurora.id)] == [100]


def test_the_hit_rate_counts_tokens_once_per_request(world: World) -> None:
    deliver(
        settled(world.aurora, world.key, prompt_tokens=100, cached_tokens=80),
        settled(world.aurora, world.key, prompt_tokens=300, cached_tokens=0),
        settled(world.aurora, world.key, prompt_tokens=500, cached_tokens=0, attempts=0, outcome="rejected"),
    )
    assert queries.traffic(EVERYTHING, hour()).total.hit_rate == pytest.approx(0.2)


def test_keyset_paging_visits_every_row_once_both_ways(world: World) -> None:
    same_millisecond = [settled(world.aurora, world.key, age=5.0) for _ in range(7)]
    deliver(*same_millisecond, *(settled(world.aurora, world.key, age=n + 1) for n in range(16)))
    window, seen, before = hour(), [], None
    pages = []
    while True:
        page = queries.page(EVERYTHING, window, before=before, limit=5)
        pages.append([r.id for r in page.records])
        seen += pages[-1]
        before = page.older
        if before is None:
            break
    assert len(seen) == len(set(seen)) == 23
    assert seen == sorted(seen, reverse=True)
    back = queries.page(EVERYTHING, window, after=pages[2][0], limit=5)
    assert [r.id for r in back.records] == pages[1]
    assert back.newer is not None and back.older is not None


def test_a_scope_sees_its_own_rows_only(world: World) -> None:
    mine, theirs = deliver(settled(world.aurora, world.key), settled(world.borealis, world.foreign_key))
    (unknown,) = deliver(settled(None, None, status=401, outcome="rejected"))
    own = scope_of(world.owner)
    assert {str(r.id) for r in queries.page(own, hour()).records} == {mine}
    assert {str(r.id) for r in queries.page(scope_of(world.admin), hour()).records} == {mine, theirs, unknown}
    assert queries.page(scope_of(world.nobody), hour()).records == []
    assert queries.record(own, uuid.UUID(theirs)) is None and queries.record(own, uuid.UUID(unknown)) is None
    assert queries.traffic(own, hour()).total.requests == 1
    assert queries.summary(own, hour(), ()).total == 1
    assert sum(len(rows) for rows in queries.export(own, hour(), ())) == 1


def test_names_of_others_cannot_be_found_out(world: World) -> None:
    for text in ("tenant:borealis", f"tenant:{world.borealis.id}", "key:borealis-key", f"key:{world.foreign_key.id}"):
        with pytest.raises(BadFilter, match="Nothing here is called"):
            names.resolve(filters.parse(text), scope_of(world.owner))
        assert names.resolve(filters.parse(text), EVERYTHING)[0].values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 4),
        ("status:ok", 2),
        ("-status:ok", 2),
        ("status:error,503", 2),
        ("ttft>500ms", 1),
        ("-ttft>500ms", 3),  # a request without a first token is not slower than anything
        ("cached=0", 1),
        ("tokens>=1k", 1),
        ("model:smollm2,other", 4),
        ("model:other", 0),
        ("key:helpdesk-prod", 4),
        ("tenant:aurora replica:smollm2", 4),
        ("replica:r1 stream:no", 1),
        ("layer:queue", 1),
    ],
)
def test_conditions_choose_rows(world: World, text: str, expected: int) -> None:
    deliver(
        settled(world.aurora, world.key, world.replica, ttft_us=900_000, prompt_tokens=1000),
        settled(world.aurora, world.key, world.replica, cached_tokens=0),
        settled(world.aurora, world.key, world.replica, outcome="error", status=502, ttft_us=None, stream=False),
        settled(world.aurora, world.key, world.replica, outcome="rejected", status=503, ttft_us=None, queue_us=900_000),
    )
    wanted = names.resolve(filters.parse(text), EVERYTHING)
    assert len(queries.page(EVERYTHING, hour(), wanted).records) == expected
    assert queries.summary(EVERYTHING, hour(), wanted).matching == expected


def test_the_histogram_holds_every_first_token(world: World) -> None:
    deliver(
        *(
            settled(world.aurora, world.key, ttft_us=u, age=n + 1)
            for n, u in enumerate([900, 5_000, 80_000, 81_000, 9_000_000])
        )
    )
    found = queries.histogram(EVERYTHING, hour(), filters.parse("ttft>1s"))
    assert found is not None and sum(found.counts) == 5
    assert queries.histogram(Scope(()), hour(), ()) is None
    deliver(settled(world.borealis, world.foreign_key, ttft_us=42_000))
    one = queries.histogram(scope_of(world.stranger), hour(), ())
    assert one is not None and sum(one.counts) == 1


@pytest.mark.parametrize("by", list(queries.GROUPS))
def test_groups_share_out_all_matching_rows(world: World, by: str) -> None:
    deliver(
        *(settled(world.aurora, world.key, world.replica, cached_tokens=32 * (n % 2), age=n + 1) for n in range(10))
    )
    found = queries.groups(EVERYTHING, hour(), (), by)
    assert sum(g.requests for g in found) == 10
    assert sum(g.share for g in found) == pytest.approx(1)


def test_one_request_visits_one_partition(world: World) -> None:
    (made,) = deliver(settled(world.aurora, world.key))
    row = queries.record(EVERYTHING, uuid.UUID(made))
    assert row is not None and queries.detail(row)["clock"] == "shared"
    at = windows.stamp(row.id)
    with connection.cursor() as cursor:
        cursor.execute(
            "EXPLAIN SELECT * FROM telemetry_requestrecord WHERE started_at >= %s AND started_at < %s AND id = %s",
            [at, at + timedelta(milliseconds=1), made],
        )
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert plan.count(" on telemetry_requestrecord_") == 1, plan


def test_neighbours_and_rank(world: World) -> None:
    ids = deliver(*(settled(world.aurora, world.key, age=100 - n, ttft_us=1000 * (n + 1)) for n in range(30)))
    row = queries.record(EVERYTHING, uuid.UUID(ids[10]))
    assert row is not None
    assert [str(i) for i in queries.neighbours(EVERYTHING, row)] == [ids[9], ids[11]]
    assert queries.rank(EVERYTHING, row).ttft == pytest.approx(11 / 30)


def test_a_slow_read_is_cut_off_and_told(world: World) -> None:
    with pytest.raises(queries.TooSlow), queries.reading(50), connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(2)")


def test_the_export_stops_at_its_bound(world: World) -> None:
    deliver(*(settled(world.aurora, world.key, age=n + 1) for n in range(25)))
    chunks = list(queries.export(EVERYTHING, hour(), (), limit=12, chunk=5))
    assert [len(c) for c in chunks] == [5, 5, 2]


def test_the_trace_covers_the_whole_request(world: World) -> None:
    (made,) = deliver(settled(world.aurora, world.key))
    row = queries.record(EVERYTHING, uuid.UUID(made))
    assert row is not None
    body = queries.detail(row)
    drawn = trace.build(row, body)
    assert drawn.attributed == 1.0
    assert sum(s.us for s in drawn.whole) == drawn.duration == 520_000
    assert sum(s.us for s in drawn.to_first_token) == row.ttft_us
    prefill = next(r for r in drawn.rows if r.layer == "prefill")
    assert [(s.start, s.end) for s in prefill.segments] == [(11_500, 110_000), (110_000, 209_500)]
    assert trace.verdict(row, drawn, body)[0].startswith("93 % of the time to first token was prefill of 32 tokens")
    found = trace.gaps(body)
    assert found is not None and (found.p50, found.p99, found.largest, found.largest_at) == (25.0, 60.0, 60.0, 12)
    held = trace.blocks(row, body)
    assert held is not None and (held.cached, held.computed, held.generated) == (2, 2, 1)


def test_what_no_phase_covers_is_unattributed(world: World) -> None:
    body = {"phases": [("auth", 0, 100, {}), ("decode", 300, 900, {})]}
    (made,) = deliver(settled(world.aurora, world.key, duration_us=1000, ttft_us=400, body=body))
    row = queries.record(EVERYTHING, uuid.UUID(made))
    assert row is not None
    drawn = trace.build(row, queries.detail(row))
    assert [s.us for s in drawn.whole if s.layer == "none"] == [300]
    hole = next(r for r in drawn.rows if r.layer == "none")
    assert [(s.start, s.end) for s in hole.segments] == [(100, 300), (900, 1000)]
    assert drawn.attributed == 0.7


def test_a_swapped_request_says_how_much_came_back(world: World) -> None:
    """Blocks a prefix brought from the host before the preemption are not counted."""
    events = [
        ("SWAPPED_IN", 100, {"blocks": 9}),
        ("PREEMPTED", 400, {"kind": "swap"}),
        ("SWAPPED_IN", 500, {"blocks": 3}),
    ]
    body = {"phases": [("decode", 0, 900, {})], "events": [("engine", *event) for event in events]}
    (made,) = deliver(settled(world.aurora, world.key, duration_us=900, body=body, preemptions=1))
    row = queries.record(EVERYTHING, uuid.UUID(made))
    assert row is not None
    (decode,) = trace.build(row, queries.detail(row)).rows
    assert decode.note == "1 preemption, 3 blocks swapped in"
    assert [trace.event_title(e.name) for e in trace.events(body)] == ["swapped in", "preempted", "swapped in"]
