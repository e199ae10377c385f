"""Which deployment: shares, stickiness, wishes, fallbacks, copies."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import BadRequest
from serving.port import Principal, Replica, Route, Target
from serving.routing import NO_HINTS, POLICIES, Hints, permitted, pick_target, takers

DEPLOYMENTS = ("a", "b", "c", "d")

weights = st.dictionaries(st.sampled_from(DEPLOYMENTS), st.integers(0, 100), min_size=1)
draws = st.floats(0, 1, exclude_max=True)
able = st.sets(st.sampled_from(DEPLOYMENTS))
keys = st.text(min_size=1, max_size=8)


def replica(name: str, deployment: str = "a", **changes: object) -> Replica:
    fields: dict[str, object] = {
        "id": f"id-{name}", "name": name, "deployment_id": deployment, "deployment_name": f"name-{deployment}",
        "state": "ready", "engine": "embedded", "engine_version": "1", "runtime": "r", "device": "cpu", "epoch": 1,
        "max_num_seqs": 16,
    }  # fmt: skip
    return Replica(**(fields | changes))  # type: ignore[arg-type]


def route(shares: dict[str, int], *, sticky: bool = True, fallbacks: tuple[str, ...] = (), **roles: str) -> Route:
    targets = tuple(Target(each, weight, roles.get(each, "stable")) for each, weight in shares.items())
    return Route(id="r", name="m", targets=targets, created=0, sticky=sticky, fallbacks=fallbacks)


def ready(*deployments: str) -> dict[str, list[Replica]]:
    return {each: [replica(f"{each} r1", each)] for each in deployments}


def picked(to: Route, up: dict[str, list[Replica]], key: str = "k", draw: float = 0.5) -> str | None:
    return pick_target(to, up, key, NO_HINTS, draw).deployment_id


@given(weights, able, keys, draws, st.booleans())
def test_a_target_that_can_take_it_is_found_and_only_one_that_has_a_share(
    shares: dict[str, int], up: set[str], key: str, draw: float, sticky: bool
) -> None:
    choice = pick_target(route(shares, sticky=sticky), ready(*up), key, NO_HINTS, draw)
    can = {each for each, weight in shares.items() if weight and each in up}
    assert (choice.deployment_id in can) if can else choice.deployment_id is None
    assert choice.reason or choice.deployment_id


@given(weights, able, keys, draws, st.booleans(), st.randoms())
def test_the_order_of_targets_does_not_matter(
    shares: dict[str, int], up: set[str], key: str, draw: float, sticky: bool, order: random.Random
) -> None:
    shuffled = list(shares.items())
    order.shuffle(shuffled)
    one = picked(route(shares, sticky=sticky), ready(*up), key, draw)
    assert one == picked(route(dict(shuffled), sticky=sticky), ready(*up), key, draw)


@given(weights, able, keys, draws, draws)
def test_a_key_stays_whatever_the_draw(shares: dict[str, int], up: set[str], key: str, one: float, two: float) -> None:
    to = route(shares)
    assert picked(to, ready(*up), key, one) == picked(to, ready(*up), key, two)


@given(weights, st.sampled_from(DEPLOYMENTS), st.integers(0, 100), keys)
def test_a_changed_weight_moves_a_key_only_from_or_to_it(
    shares: dict[str, int], changed: str, weight: int, key: str
) -> None:
    before, after = (picked(route(each), ready(*DEPLOYMENTS), key) for each in (shares, shares | {changed: weight}))
    grew = weight > shares.get(changed, 0)
    assert before == after or (after if grew else before) == changed


@given(weights, st.sampled_from(DEPLOYMENTS), keys)
def test_a_target_that_fails_moves_its_own_keys_only(shares: dict[str, int], down: str, key: str) -> None:
    to = route(shares)
    before = picked(to, ready(*DEPLOYMENTS), key)
    after = picked(to, ready(*(each for each in DEPLOYMENTS if each != down)), key)
    assert before == after or before == down


@pytest.mark.parametrize("sticky", [True, False])
def test_the_split_is_that_of_the_weights(sticky: bool) -> None:
    to, source = route({"a": 70, "b": 25, "c": 5}, sticky=sticky), random.Random(7)
    count = 20_000
    seen = Counter(picked(to, ready("a", "b", "c"), f"key-{n}", source.random()) for n in range(count))
    for deployment, share in (("a", 0.70), ("b", 0.25), ("c", 0.05)):
        error = (share * (1 - share) / count) ** 0.5
        assert abs(seen[deployment] / count - share) < 5 * error


def test_a_moved_weight_moves_no_more_keys_than_it_must() -> None:
    before, after = route({"a": 95, "b": 5}), route({"a": 75, "b": 25})
    up, count = ready("a", "b"), 10_000
    moved = sum(picked(before, up, f"k{n}") != picked(after, up, f"k{n}") for n in range(count))
    assert abs(moved / count - 0.20) < 0.02


def test_fallbacks_are_asked_in_order_once_no_target_can() -> None:
    to = route({"a": 100}, fallbacks=("b", "c"))
    assert pick_target(to, ready("a", "b", "c"), "k", NO_HINTS, 0).role == "stable"
    choice = pick_target(to, ready("b", "c"), "k", NO_HINTS, 0)
    assert (choice.deployment_id, choice.role) == ("b", "fallback")
    assert picked(to, ready("c")) == "c"
    choice = pick_target(to, {}, "k", NO_HINTS, 0)
    assert choice.deployment_id is None and "nor a fallback" in choice.reason


def test_a_shadow_takes_copies_of_its_percentage_and_nothing_else() -> None:
    to, source = route({"a": 1, "s": 30}, s="shadow"), random.Random(3)
    choices = [pick_target(to, ready("a", "s"), "k", NO_HINTS, source.random()) for _ in range(5000)]
    assert {each.deployment_id for each in choices} == {"a"}
    assert abs(sum(each.shadows == ("s",) for each in choices) / 5000 - 0.30) < 0.03
    assert picked(to, ready("s")) is None
    assert pick_target(to, ready("a"), "k", NO_HINTS, 0.1).shadows == ()
    everything = route({"a": 1, "s": 100}, s="shadow")
    assert pick_target(everything, ready("a", "s"), "k", NO_HINTS, source.random()).shadows == ("s",)


def test_copies_do_not_depend_on_where_the_request_goes() -> None:
    to, source = route({"a": 50, "b": 50, "s": 50}, sticky=False, s="shadow"), random.Random(5)
    choices = [pick_target(to, ready("a", "b", "s"), "k", NO_HINTS, source.random()) for _ in range(4000)]
    of_a = [bool(each.shadows) for each in choices if each.deployment_id == "a"]
    assert abs(sum(of_a) / len(of_a) - 0.5) < 0.06


@pytest.mark.parametrize(
    ("hints", "deployment", "only"),
    [
        (Hints(target="b"), "b", ""),
        (Hints(target="name-b"), "b", ""),
        (Hints(target="s"), "s", ""),
        (Hints(target="f"), "f", ""),
        (Hints(replica="b r1"), "b", "id-b r1"),
        (Hints(replica="id-b r1", target="b"), "b", "id-b r1"),
        (Hints(replica="b r1", target="a"), None, ""),
        (Hints(target="elsewhere"), None, ""),
        (Hints(target="down"), None, ""),
    ],
)
def test_what_is_asked_for_by_header_is_had_or_refused(hints: Hints, deployment: str | None, only: str) -> None:
    to = route({"a": 100, "b": 0, "s": 1, "down": 1}, fallbacks=("f",), s="shadow")
    choice = pick_target(to, ready("a", "b", "s", "f", "elsewhere"), "k", hints, 0)
    assert (choice.deployment_id, choice.replica_id) == (deployment, only)
    assert "header" in choice.reason


def principal(may: bool) -> Principal:
    return Principal(key_id="k", key_name="", tenant_id="t", tenant_name="", may_override=may)


def test_only_who_may_override_does() -> None:
    hints = Hints(policy="round-robin", target="b", replica="x", session="s", retry=2)
    assert permitted(hints, principal(True)) == hints
    assert permitted(hints, principal(False)) == Hints(session="s", retry=2)
    assert permitted(Hints(policy="nonsense"), principal(False)) == NO_HINTS
    with pytest.raises(BadRequest) as refused:
        permitted(Hints(policy="nonsense"), principal(True))
    assert all(policy in refused.value.message for policy in POLICIES)


def test_takers_are_ready_well_and_not_just_failed() -> None:
    every = [replica("1"), replica("2"), replica("3", "b"), replica("4", "b", state="draining")]
    sick = {"id-2": "breaker open"}

    def found(avoid: tuple[str, ...] = ()) -> dict[str, list[str]]:
        by_deployment = takers(every, lambda each: sick.get(each.id, ""), avoid)
        return {deployment: [each.id for each in group] for deployment, group in by_deployment.items()}

    assert found() == {"a": ["id-1"], "b": ["id-3"]}
    assert found(("id-1",)) == {"b": ["id-3"]}
    assert found(("id-1", "id-3")) == {"a": ["id-1"], "b": ["id-3"]}
