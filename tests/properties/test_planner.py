"""The planner: filter, fit, score, and why not; the field's cases, and random cards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import placement as bench
from console.placement.ledger import Card, Need, Resident
from console.placement.planner import Board, Policy, plan
from engine.footprint import Footprint

GIB = 1 << 30


def gib(size: float) -> int:
    return int(size * GIB)


def card(uid: str, *residents: Resident, total: float = 80, **more: Any) -> Card:
    more = {"node": uid[0], "kind": "gpu", "name": "A100-80G", "index": int(uid[1:]), **more}
    return Card(uid, total=gib(total), residents=residents, **more)


def resident(model: str, reserved: float, **more: Any) -> Resident:
    return Resident(f"{model}-r1", f"{model} r1", model, gib(reserved), "vllm", model, **more)


def need(model: str = "extract-7b", peak: float = 19.6, **more: Any) -> Need:
    parts = Footprint(gib(peak) - gib(4) - gib(1.4), gib(4), gib(1.4), 0)
    return Need(model, more.pop("engine", "vllm"), parts, **more)


def codes(found: Any, uid: str) -> list[str]:
    return next([reason.code for reason in v.reasons] for v in found.verdicts if v.uid == uid)


# -- the vampire ---------------------------------------------------------------------------------------------------


def test_the_vampire_is_refused_with_both_reasons() -> None:
    """A 7B model may not squeeze in beside a code model of 13B: another class, and no room for the buffer of 40 %."""
    host = resident("coder-13b", 72, priority_class="high", measured=gib(72))
    found = plan(need(priority_class="normal"), [card("b1", host, used=gib(72.4))])
    assert not found.placed and found.shares == ()
    assert codes(found, "b1") == ["class", "mixed"]
    assert found.reason.code == "class" and found.reason.values == {"theirs": "high", "ours": "normal"}
    mixed = found.verdicts[0].reasons[1].values
    assert mixed["needed"] == pytest.approx(gib(27.44), rel=1e-3) and mixed["models"] == "coder-13b"
    assert mixed["missing"] == mixed["needed"] - mixed["free"] and mixed["free"] < gib(7.7)


def test_of_the_same_class_it_needs_four_tenths_more() -> None:
    host = resident("coder-13b", 54)
    squeezed = plan(need(), [card("b1", host)])
    assert codes(squeezed, "b1") == ["mixed"]
    assert plan(need(model="coder-13b"), [card("b1", host)]).placed  # 23.5 of 26
    assert plan(need(), [card("b1", resident("coder-13b", 52))]).placed  # 27.4 of 28


def test_it_goes_to_the_empty_card_instead() -> None:
    cards = [card("b1", resident("coder-13b", 72, priority_class="high")), card("b3", used=gib(1.9))]
    found = plan(need(), cards)
    assert found.devices == ("b3",) and found.reason.code == "placed"
    assert found.reason.values["free"] == gib(80) - gib(1.9)
    assert [verdict.chosen for verdict in found.verdicts] == [True, False]


# -- filter --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "asked", "code"),
    [
        ({"lost": True}, {}, "lost"),
        ({"cordoned": True}, {}, "cordoned"),
        ({}, {"binding": ("z9",)}, "bound"),
        ({}, {"kinds": frozenset(("cpu",))}, "kind"),
        ({"residents": (resident("extract-7b", 10, priority_class="high"),)}, {}, "class"),
        ({"used": gib(70)}, {}, "space"),
        ({"used": gib(30)}, {"takes": gib(60)}, "takes"),
        ({}, {"cards": 2}, "group"),
    ],
)
def test_every_filtered_card_says_why(changes: dict[str, Any], asked: dict[str, Any], code: str) -> None:
    found = plan(need(**asked), [replace(card("a0"), **changes)])
    assert not found.placed and codes(found, "a0") == [code] and found.reason.code == code


def test_a_simulated_card_takes_what_runs_on_cpus_too() -> None:
    assert plan(need(kinds=frozenset(("cpu",))), [card("a0", simulated=True)]).placed


def test_a_binding_by_hand_chooses_among_its_cards() -> None:
    cards = [card("a0"), card("a1"), card("a2", used=gib(70))]
    assert plan(need(binding=("a1",)), cards).devices == ("a1",)
    refused = plan(need(binding=("a2",)), cards)
    assert codes(refused, "a2") == ["space"] and codes(refused, "a0") == ["bound"]


def test_refusals_are_counted_and_the_nearest_is_named() -> None:
    cards = [card("a0", used=gib(60)), card("a1", used=gib(70)), card("a2", cordoned=True)]
    values = plan(need(), cards).reason.values
    assert values["counts"] == {"space": 2, "cordoned": 1}
    assert values["nearest"] == cards[0].label and values["free"] == gib(20)
    assert plan(need(), []).reason.code == "no_cards"


# -- fit -----------------------------------------------------------------------------------------------------------


def test_a_pool_taken_ahead_does_not_make_an_empty_card_too_small() -> None:
    found = plan(need(takes_share=0.90), [card("a0")])
    assert found.placed and found.shares[0].reserved == int(0.9 * gib(80))


def test_the_share_that_would_fit_is_told() -> None:
    found = plan(need(takes_share=0.90), [card("a0", used=gib(20))])
    assert codes(found, "a0") == ["takes"] and found.reason.values["share"] == 0.75
    fixed = plan(need(takes=gib(70)), [card("a0", used=gib(20))])  # no share of the card would help here
    assert codes(fixed, "a0") == ["takes"] and fixed.reason.values["share"] == 0


def test_the_buffer_can_be_read_as_a_part_of_the_card() -> None:
    tight = [card("a0", total=24)]  # 19.6 × 1.2 = 23.5, or 19.6 + 4.8 = 24.4
    assert plan(need(), tight).placed
    assert not plan(need(), tight, Policy("card")).placed
    mixed = [card("a0", resident("x", 30))]  # 27.4 of 50, or 19.6 + 32
    assert plan(need(), mixed).placed and not plan(need(), mixed, Policy("card")).placed


def test_tensor_parallel_takes_equal_cards_of_one_node() -> None:
    cards = [card("a0"), card("a1", name="L40S-48G"), card("b0"), card("b1", used=gib(70)), card("b2")]
    found = plan(need(cards=2), cards)
    assert found.devices == ("b0", "b2") and found.reason.values["cards"] == 2
    assert codes(found, "a0") == ["group"] and codes(found, "b1") == ["space"]
    assert all(share.reserved == need().peak.total for share in found.shares)


# -- score ---------------------------------------------------------------------------------------------------------


def test_packing_fills_and_spreading_keeps_apart() -> None:
    cards = [card("a0", resident("extract-7b", 20)), card("a1"), card("b0")]
    assert plan(need(), cards).devices == ("a0",)
    ours = replace(need(spread=True), deployment="extract-7b")
    assert plan(ours, cards).devices == ("b0",)


def test_weights_on_the_nodes_disk_and_a_cool_card_are_better() -> None:
    cards = [card("a0"), card("b0", on_disk=frozenset(("extract-7b",))), card("c0")]
    assert plan(need(), cards).devices == ("b0",)
    hot = [card("a0", temperature=84.0), card("b0", temperature=45.0)]
    assert plan(need(), hot).devices == ("b0",)


def test_on_a_cpu_it_gets_cores_and_shared_ones_when_there_are_no_others() -> None:
    cpu = Card("n/cpu", "n", "cpu", "EPYC", gib(64), cores=(0, 1, 2, 3))
    board = Board([cpu])
    asked = replace(need(peak=6), kinds=frozenset(("cpu",)), threads=3)
    first, second = board.plan(asked), None
    assert first.shares[0].cores == (0, 1, 2) and first.shares[0].exclusive
    board.put(first, "r1")
    second = board.plan(asked)
    assert second.shares[0].cores == (0, 1, 3) and not second.shares[0].exclusive


def test_only_what_lived_on_lost_nodes_moves() -> None:
    board = Board([card(f"{node}{n}") for node in "abc" for n in range(2)])
    for number in range(5):
        board.put(board.plan(need(spread=True)), f"r{number}")
    homes = dict(board.homes)
    moving = board.lose(["a"])
    assert moving and set(moving) == {replica for replica, (_n, uids) in homes.items() if uids[0].startswith("a")}
    for replica in moving:
        asked = board.homes[replica][0]
        board.drop(replica)
        board.put(board.plan(asked), replica)
    assert all(not uids[0].startswith("a") for _n, uids in board.homes.values())
    assert all(board.homes[replica] == homes[replica] for replica in homes if replica not in moving)


def test_the_bench_at_a_small_size_moves_only_what_must(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NODES", 60), ("REPLICAS", 150), ("LOST", 2), ("DEPLOYMENTS", 10)):
        monkeypatch.setattr(bench, name, value)
    figures = bench.run()  # leaves where somebody moved who need not have, or a card is over-committed
    assert (figures["cards"], figures["placed"], figures["without_a_place"]) == (480, 150, 0)
    assert int(str(figures["moved"])) > 0


# -- random cards --------------------------------------------------------------------------------------------------

CARDS = st.builds(
    lambda uid, total, used, residents, heat, flags: card(
        uid, *residents, total=total, used=used * GIB, temperature=heat, cordoned=flags == 0, lost=flags == 1
    ),
    st.builds("{}{}".format, st.sampled_from("abc"), st.integers(0, 3)),
    st.sampled_from([24, 48, 80]),
    st.integers(0, 40),
    st.lists(
        st.builds(resident, st.sampled_from(["x", "y"]), st.integers(1, 30), lends=st.booleans()),
        max_size=2, unique_by=lambda one: one.model,
    ),
    st.one_of(st.none(), st.floats(20, 95)),
    st.integers(0, 8),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    cards=st.lists(CARDS, unique_by=lambda one: one.uid, max_size=8),
    asked=st.builds(
        need, model=st.sampled_from(["x", "y", "z"]), peak=st.integers(6, 60), cards=st.sampled_from([1, 1, 2]),
        spread=st.booleans(), borrows=st.booleans(), takes_share=st.sampled_from([0.0, 0.0, 0.5, 0.9]),
    ),
)  # fmt: skip
def test_every_card_has_a_verdict_that_agrees_with_the_choice(cards: list[Card], asked: Need) -> None:
    found = plan(asked, cards)
    assert {verdict.uid for verdict in found.verdicts} == {one.uid for one in cards}
    for verdict in found.verdicts:
        assert verdict.fits == (verdict.score is not None)
        assert not verdict.chosen or verdict.fits
    fitting = [verdict for verdict in found.verdicts if verdict.fits]
    assert found.placed == bool(fitting)
    if asked.cards == 1 and fitting:
        assert found.score == max(verdict.score or 0 for verdict in fitting)
    if found.placed:
        assert len(found.devices) == asked.cards
        chosen = [one for one in cards if one.uid in found.devices]
        assert len({(one.node, one.name) for one in chosen}) == 1
