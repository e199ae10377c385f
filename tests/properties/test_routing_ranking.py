"""Which replica: every policy ranks all that can take it, and says why of the others."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serving.port import ReplicaLoad
from serving.routing import POLICIES, Candidate, Turns, decided, rank
from serving.routing.candidate import NOMINAL_SLOTS
from serving.routing.decision import MAX_RECORDED
from serving.routing.ranking import LOAD_CAP
from tests.properties.test_routing_targets import replica

NOW = 1_000_000.0

loads = st.builds(
    ReplicaLoad,
    at=st.floats(NOW - 20, NOW + 20),
    running=st.integers(0, 16),
    waiting=st.integers(0, 40),
    kv_usage=st.floats(0, 1),
    free_blocks=st.integers(0, 100),
    steps=st.integers(0, 100),
    gpu_utilisation=st.none() | st.floats(0, 1),
    gpu_memory=st.none() | st.floats(0, 1),
)


@st.composite
def candidates(draw: st.DrawFn, least: int = 0) -> list[Candidate]:
    count = draw(st.integers(least, 6))
    return [
        Candidate(
            replica(f"{n}", state=draw(st.sampled_from(["ready", "ready", "draining"])),
                    max_num_seqs=draw(st.sampled_from([0, 4, 16]))),
            draw(st.integers(0, 20)),
            draw(st.none() | loads),
            draw(st.integers(0, 20)),
            draw(st.sampled_from([0, 0, 256, 1024])),
            draw(st.sampled_from(["", "", "breaker open"])),
        )
        for n in range(count)
    ]  # fmt: skip


policies = st.sampled_from(POLICIES)
turns = st.integers(0, 1000)


@given(policies, candidates(), turns, st.sets(st.sampled_from([f"id-{n}" for n in range(6)])), st.text(max_size=3))
def test_all_that_can_take_it_are_ranked_and_the_others_say_why(
    policy: str, known: list[Candidate], turn: int, avoid: set[str], session: str
) -> None:
    ranking = rank(policy, known, turn=turn, now=NOW, affinity=session, avoid=avoid)
    able = {each.replica.id for each in known if each.replica.state == "ready" and not each.verdict}
    assert {each.replica.id for each in ranking.ranked} == (able - avoid or able)
    assert all(each.verdict and each.score is None for each in ranking.excluded)
    assert len(ranking.ranked) + len(ranking.excluded) == len(known)
    scores = [each.score for each in ranking.ranked]
    assert scores == sorted(scores, key=lambda score: score or 0.0)
    assert ranking.reason


@given(policies, candidates(), turns, st.randoms(), st.text(max_size=3))
def test_the_order_of_candidates_does_not_matter(
    policy: str, known: list[Candidate], turn: int, order: random.Random, session: str
) -> None:
    shuffled = list(known)
    order.shuffle(shuffled)
    one, two = (rank(policy, each, turn=turn, now=NOW, affinity=session) for each in (known, shuffled))
    assert [each.replica.id for each in one.ranked] == [each.replica.id for each in two.ranked]


@given(st.sampled_from(["prefix-aware", "session-affinity"]), candidates(1), turns, st.text(max_size=3))
def test_nothing_kept_outweighs_the_load_cap(policy: str, known: list[Candidate], turn: int, session: str) -> None:
    ranking = rank(policy, known, turn=turn, affinity=session)
    assume(ranking.ranked)
    least = min(each.candidate.share for each in ranking.ranked)
    assert ranking.ranked[0].candidate.share <= least + LOAD_CAP


@given(candidates(1), turns)
def test_the_longest_prefix_within_the_cap_wins(known: list[Candidate], turn: int) -> None:
    ranking = rank("prefix-aware", known, turn=turn)
    assume(ranking.ranked)
    cap = min(each.candidate.share for each in ranking.ranked) + LOAD_CAP
    longest = max(each.candidate.cached_tokens for each in ranking.ranked if each.candidate.share <= cap)
    assert ranking.ranked[0].candidate.cached_tokens == longest


@given(candidates(1), turns)
def test_least_connections_takes_the_smallest_share(known: list[Candidate], turn: int) -> None:
    ranking = rank("least-connections", known, turn=turn)
    assume(ranking.ranked)
    assert ranking.ranked[0].candidate.share == min(each.candidate.share for each in ranking.ranked)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_round_robin_starves_nobody_whatever_the_load(count: int) -> None:
    known = [Candidate(replica(f"{n}"), in_use=n * 5) for n in range(count)]
    turns = Turns()
    firsts = []
    for _ in range(3 * count):
        firsts.append(rank("round-robin", known, turn=turns.next("a")).ranked[0].replica.id)
        turns.next("b")  # another pool in between must not keep this one from its turns
    assert all(firsts.count(each.replica.id) == 3 for each in known)
    turns.prune(["b"])
    assert (turns.next("a"), turns.next("b")) == (0, 3 * count)


@given(st.text(min_size=1, max_size=6), turns, st.sampled_from([f"id-{n}" for n in range(5)]))
def test_a_session_stays_while_its_replica_does(session: str, turn: int, gone: str) -> None:
    known = [Candidate(replica(f"{n}")) for n in range(5)]
    home = rank("session-affinity", known, turn=turn, affinity=session).ranked[0].replica.id
    assert rank("session-affinity", known, turn=turn + 1, affinity=session).ranked[0].replica.id == home
    left = [each for each in known if each.replica.id != gone]
    moved = rank("session-affinity", left, turn=turn, affinity=session).ranked[0].replica.id
    assert moved == home or home == gone


def load(**changes: Any) -> ReplicaLoad:
    idle = ReplicaLoad(at=NOW, running=0, waiting=0, kv_usage=0.0, free_blocks=100, steps=1)
    return msgspec.structs.replace(idle, **changes)


@pytest.mark.parametrize(
    "worse",
    [
        {"kv_usage": 0.9},
        {"waiting": 9},
        {"gpu_utilisation": 1.0},
        {"gpu_memory": 1.0},
    ],
)
def test_load_aware_sees_each_part_and_believes_no_old_report(worse: dict[str, Any]) -> None:
    calm = {"gpu_utilisation": 0.1, "gpu_memory": 0.1}
    busy = load(**(calm | worse))
    known = [Candidate(replica("1"), load=busy), Candidate(replica("2"), load=load(**calm))]
    for turn in (0, 1):
        assert rank("load-aware", known, turn=turn, now=NOW).ranked[0].replica.id == "id-2"
    scores = {each.score for each in rank("load-aware", known, turn=0, now=NOW + 60).ranked}
    assert len(scores) == 1


def test_load_aware_takes_what_is_not_told_for_the_mean() -> None:
    known = [
        Candidate(replica("1"), load=load(kv_usage=0.9)),
        Candidate(replica("2")),
        Candidate(replica("3"), load=load()),
    ]
    ranking = rank("load-aware", known, turn=0, now=NOW)
    assert [each.replica.id for each in ranking.ranked] == ["id-3", "id-2", "id-1"]


def test_an_engine_without_bound_compares_by_nominal_slots() -> None:
    assert Candidate(replica("1", max_num_seqs=0), in_use=NOMINAL_SLOTS // 2).share == 0.5
    assert Candidate(replica("1"), in_flight=8, in_use=4).share == 0.5


def test_the_decision_keeps_what_it_was_made_by() -> None:
    known = [Candidate(replica(f"{n}"), in_use=n, load=load(running=3)) for n in range(40)]
    ranking = rank("round-robin", [*known, Candidate(replica("x"), verdict="breaker open")], turn=0)
    decision = decided(ranking, "id-5", {"id-0": 16, "id-5": 2})
    rows = decision.candidates
    assert len(rows) == MAX_RECORDED
    assert (rows[0]["replica_id"], rows[0]["verdict"], rows[0]["in_use"], rows[0]["running"]) == (
        "id-5",
        "chosen",
        2,
        3,
    )
    assert (rows[1]["replica_id"], rows[1]["verdict"]) == ("id-0", "no free slot")
    assert "free slot" in decision.reason
    assert msgspec.msgpack.encode(rows)


def test_one_that_was_asked_for_is_the_only_one() -> None:
    known = [Candidate(replica("1")), Candidate(replica("2"))]
    ranking = rank("round-robin", known, turn=0, only="id-2")
    assert [each.replica.id for each in ranking.ranked] == ["id-2"]
    assert ranking.excluded[0].verdict == "another one was asked for"
    nobody = decided(rank("round-robin", known, turn=0, only="id-9"), None)
    assert nobody.replica is None and nobody.reason == "no replica can take it"


def test_why_nobody_can_take_it() -> None:
    assert rank("round-robin", [], turn=0).reason == "the route has no replica"
    assert rank("round-robin", [Candidate(replica("1", state="starting"))], turn=0).reason == "no replica is ready"
