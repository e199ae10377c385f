"""The ledger under random events, against a driver that tells the truth.

Never over-committed: what residents may grow to, and what nobody is known to hold, is never more than a card has when
somebody is admitted. No stranded bytes: whatever no resident holds is free. Never freed before the driver shows it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from console.placement.ledger import DRAIN_FROM, LEND_UNTIL, Card, Need, Resident, left_behind, pressed, share_of_cores
from console.placement.planner import Board, Policy
from engine.footprint import Footprint

GIB = 1 << 30
TOTAL = 80 * GIB
SIZES = st.integers(1, 40).map(lambda size: size * GIB)
NEEDS = st.builds(
    Need,
    model=st.sampled_from(["7b", "13b", "32b"]),
    engine=st.just("embedded"),
    peak=st.builds(Footprint, SIZES, st.integers(0, 8 * GIB), st.just(GIB // 2), st.just(GIB // 2)),
    deployment=st.sampled_from("abc"),
    priority_class=st.sampled_from(["normal", "normal", "high"]),
    spread=st.booleans(),
    takes=st.sampled_from([0, 0, 30 * GIB, 60 * GIB]),
    cards=st.sampled_from([1, 1, 1, 2]),
    lends=st.booleans(),
    floor=st.sampled_from([0, 10 * GIB, 25 * GIB]),
    borrows=st.booleans(),
)
WHICH = st.integers(0, 1000)


class Ledger(RuleBasedStateMachine):
    """A board of two nodes with three cards each, and what really lies on them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.real: dict[tuple[str, str], int] = {}  # card and replica → bytes that the driver has
        self.foreign: dict[str, int] = {}
        self.gone: dict[str, dict[str, int]] = {}  # replica without a process → by card, what was unattributed before

        self.overgrown: set[str] = set()

    @initialize(buffer_of=st.sampled_from(["need", "card"]))
    def begin(self, buffer_of: str) -> None:
        cards = [Card(f"{node}{n}", node, "gpu", "A100", TOTAL, index=n) for node in "ab" for n in range(3)]
        self.board = Board(cards, Policy(buffer_of))
        self.foreign = dict.fromkeys(self.board.cards, 0)

    # -- events -------------------------------------------------------------------------------------------------------

    @rule(needs=st.lists(NEEDS, min_size=1, max_size=4))
    def place(self, needs: list[Need]) -> None:
        for need in needs:
            self._place(need)

    def _place(self, need: Need) -> None:
        if need.borrows:  # the controller looks before it lends what may be used by now
            self.measure()
        plan = self.board.plan(need)
        before = dict(self.board.cards)
        if not plan.placed:
            assert all(verdict.reasons for verdict in plan.verdicts)
            return
        self.count += 1
        replica = f"r{self.count}"
        self.board.put(plan, replica, replica, since=self.count)
        for share in plan.shares:
            old, card = before[share.uid], self.board.cards[share.uid]
            self.real[share.uid, replica] = 0
            assert not old.lost and not old.cordoned
            assert card.free >= 0
            assert len(card.classes) == 1
            buffer = 0.2 if old.models <= {need.model} else 0.4
            of = TOTAL if self.board.policy.buffer_of == "card" else need.peak.total
            assert old.free + share.lent + (old.best_lender[1] if need.borrows else 0) >= need.peak.total + int(
                buffer * of
            )
            assert sum(self._limit(card, r) for r in card.residents) + card.unattributed <= card.total
            lender = card.resident(share.lender)
            assert not share.lent or lender is not None and lender.measured <= LEND_UNTIL * card.left(lender) + 1
            assert not share.lent or lender is not None and lender.floor <= card.left(lender)

    @precondition(lambda self: self.real)
    @rule(which=WHICH, share=st.floats(0, 1))
    def grow(self, which: int, share: float) -> None:
        uid, replica = sorted(self.real)[which % len(self.real)]
        card = self.board.cards[uid]
        resident = card.resident(replica)
        if resident is not None and replica not in self.gone:
            room = self._limit(card, resident)
            self.real[uid, replica] = max(self.real[uid, replica], int(share * room))

    @precondition(lambda self: self.real)
    @rule(which=WHICH, more=st.integers(1, 20))
    def grow_beyond_the_plan(self, which: int, more: int) -> None:
        uid, replica = sorted(self.real)[which % len(self.real)]
        resident = self.board.cards[uid].resident(replica)
        room = TOTAL - self.foreign[uid] - sum(size for (card, _r), size in self.real.items() if card == uid)
        if resident is not None and replica not in self.gone and not resident.lends:
            self.real[uid, replica] += min(room, more * GIB)
            self.overgrown.add(uid)

    @rule(which=WHICH, share=st.floats(0, 1))
    def strangers_come_and_go(self, which: int, share: float) -> None:
        uid = sorted(self.foreign)[which % len(self.foreign)]
        ours = sum(size for (card, _replica), size in self.real.items() if card == uid)
        self.foreign[uid] = int(share * (TOTAL - ours) / 4)

    @rule()
    def measure(self) -> None:
        """What the driver shows comes into the ledger; those without a process and without bytes are let go."""
        for uid, card in list(self.board.cards.items()):
            if card.lost:
                continue
            # Of a process that is gone the driver knows only that something is used.
            lines = tuple(
                replace(r, measured=0 if r.replica in self.gone else self.real[uid, r.replica]) for r in card.residents
            )
            used = self.foreign[uid] + sum(size for (where, _r), size in self.real.items() if where == uid)
            self.board.change(replace(card, used=used, residents=lines))
        for replica, before in list(self.gone.items()):
            if not any(self._left(uid, unattributed) for uid, unattributed in before.items()):
                really = sum(size for (_uid, who), size in self.real.items() if who == replica)
                assert really <= 2 * (TOTAL // 200) or self._strangers_left(before), "freed before the driver showed it"
                self.board.drop(replica)
                del self.gone[replica]
                for uid in before:
                    del self.real[uid, replica]

    @precondition(lambda self: self.board.homes)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        self._end(sorted(self.board.homes)[which % len(self.board.homes)])

    @precondition(lambda self: self.gone)
    @rule(which=WHICH, share=st.sampled_from([0.0, 0.0, 0.5]))
    def driver_frees(self, which: int, share: float) -> None:
        replica = sorted(self.gone)[which % len(self.gone)]
        for uid in self.gone[replica]:
            self.real[uid, replica] = int(self.real[uid, replica] * share)

    @precondition(lambda self: len(self.board.homes) > 8)
    @rule(node=st.sampled_from("ab"))
    def lose_a_node_and_get_it_back(self, node: str) -> None:
        moving = self.board.lose([node])
        away = {uid for uid, card in self.board.cards.items() if card.node == node}
        expected = {replica for replica, (_need, uids) in self.board.homes.items() if away & set(uids)}
        assert set(moving) == expected
        for replica in moving:
            for uid in self.board.homes[replica][1]:
                self.real.pop((uid, replica), None)
            self.gone.pop(replica, None)
            self.board.drop(replica)
        for uid in away:
            self.foreign[uid] = 0
            self.overgrown.discard(uid)
            self.board.change(replace(self.board.cards[uid], lost=False, used=0))

    @rule()
    def preempt(self) -> None:
        for card in list(self.board.cards.values()):
            for press in pressed(card):
                borrower, lender = card.resident(press.borrower), card.resident(press.lender)
                assert borrower is not None and borrower.lender == press.lender and borrower.lent > 0
                assert lender is not None and lender.measured >= DRAIN_FROM * card.left(lender)
                others = [r for r in card.residents if r.lender == press.lender and not r.releasing]
                assert all(r.since <= borrower.since for r in others)
                self._end(press.borrower)

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_stranded(self) -> None:
        for card in getattr(self, "board", Board([])).cards.values():
            assert card.free + card.claimed + card.unattributed == card.total
            if not card.residents:
                assert card.free == card.total - card.used
            assert {r.replica for r in card.residents} <= set(self.board.homes)
            for resident in card.residents:
                assert card.uid in self.board.homes[resident.replica][1]
                assert not resident.lent or resident.lender != resident.replica

    @invariant()
    def residents_fit_where_nobody_strange_came(self) -> None:
        for card in getattr(self, "board", Board([])).cards.values():
            limits = sum(self._limit(card, resident) for resident in card.residents)
            assert limits <= card.total or card.uid in self.overgrown

    @invariant()
    def a_board_that_remembers_decides_as_a_new_one(self) -> None:
        board = getattr(self, "board", None)
        for need in list(board._tables)[-2:] if board else ():
            old, new = board.choose(need), Board(board.cards.values(), board.policy).choose(need)
            assert (old.devices, old.score) == (new.devices, new.score)

    # -- help ---------------------------------------------------------------------------------------------------------

    def _end(self, replica: str) -> None:
        if replica in self.gone:
            return
        before = {}
        for uid in self.board.homes[replica][1]:
            card = self.board.cards[uid]
            before[uid] = card.unattributed
            self.board.change(card.with_changed(replica, releasing=True))
        self.gone[replica] = before

    def _left(self, uid: str, before: int) -> int:
        card = self.board.cards[uid]
        return left_behind(card.kind, card.total, 0, card.used, sum(r.measured for r in card.residents), before)

    def _strangers_left(self, before: dict[str, int]) -> bool:
        """A stranger that left while a worker ended hides as much of what the worker left; it is unattributed then."""
        return any(self.foreign[uid] < unattributed for uid, unattributed in before.items())

    @staticmethod
    def _limit(card: Card, resident: Resident) -> int:
        """What an engine lets itself grow to: its reserve, less what it lent."""
        return max(card.left(resident), resident.measured)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(
    max_examples=100, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)


# -- examples ------------------------------------------------------------------------------------------------------


def resident(name: str, reserved: int, **more: object) -> Resident:
    return Resident(name, name, "7b", reserved, **more)  # type: ignore[arg-type]


def test_free_counts_the_larger_of_reserved_and_measured_and_what_nobody_holds() -> None:
    card = Card("c", "n", "gpu", "A100", 80 * GIB, used=45 * GIB)
    card = card.given(resident("a", 30 * GIB, measured=10 * GIB)).given(resident("b", 20 * GIB, measured=25 * GIB))
    assert card.unattributed == 10 * GIB
    assert card.free == (80 - 30 - 25 - 10) * GIB


def test_a_lender_lends_only_what_leaves_it_room_and_the_newest_borrower_goes_first() -> None:
    lender = resident("lender", 70 * GIB, measured=21 * GIB, lends=True)
    card = Card("c", "n", "gpu", "A100", 80 * GIB).given(lender)
    assert card.best_lender == ("lender", 40 * GIB)
    for number, name in enumerate(("old", "new")):
        card = card.given(resident(name, 20 * GIB, lender="lender", lent=20 * GIB, since=number))
    assert card.left(lender) == 30 * GIB and card.best_lender[1] == 0
    assert list(pressed(card)) == []
    full = card.with_changed("lender", measured=27 * GIB)
    (press,) = pressed(full)
    assert (press.lender, press.borrower, press.left) == ("lender", "new", 30 * GIB)
    assert list(pressed(full.without("new"))) == []
    orphan = full.without("lender")
    assert all(r.lent == 0 for r in orphan.residents)


def test_a_lender_keeps_its_floor_and_is_pressed_by_what_it_uses_not_by_what_it_keeps_for_later() -> None:
    lender = resident("lender", 70 * GIB, measured=7 * GIB, in_use=7 * GIB, lends=True, floor=30 * GIB)
    card = Card("c", "n", "cpu", "EPYC", 80 * GIB).given(lender)
    assert card.best_lender == ("lender", 40 * GIB)
    lent = card.given(resident("borrower", 40 * GIB, lender="lender", lent=40 * GIB))
    assert lent.best_lender == ("", 0)
    cached = lent.with_changed("lender", measured=30 * GIB, in_use=10 * GIB)
    assert list(pressed(cached)) == [] and cached.lendable(cached.residents[0]) == 0
    (press,) = pressed(cached.with_changed("lender", in_use=27 * GIB))
    assert (press.borrower, press.used) == ("borrower", 27 * GIB)


BYTES = st.integers(1, 80 << 10).map(lambda size: size << 20)


@given(reserved=BYTES, measured=BYTES, in_use=BYTES, floor=BYTES)
def test_a_loan_that_was_just_made_presses_nobody(reserved: int, measured: int, in_use: int, floor: int) -> None:
    lender = resident("lender", reserved, measured=measured, in_use=in_use, lends=True, floor=floor)
    card = Card("c", "n", "cpu", "EPYC", 80 * GIB).given(lender)
    lent = card.lendable(lender)
    loan = card.given(resident("borrower", lent, lender="lender", lent=lent))
    assert lent == 0 or list(pressed(loan)) == [] and loan.left(lender) >= floor


def test_a_loan_is_never_more_than_the_borrower_keeps_or_its_return_would_over_commit() -> None:
    card = Card("c", "n", "gpu", "A100", 80 * GIB).given(resident("lender", 80 * GIB, measured=10 * GIB, lends=True))
    need = Need("7b", "embedded", Footprint(30 * GIB, 0, 0, 0), borrows=True)
    board = Board([card])
    plan = board.plan(need)
    assert plan.reason.code == "borrowed" and plan.shares[0].lent == 30 * GIB
    board.put(plan, "borrower")
    assert board.cards["c"].free == 0  # the buffer was looked for, and is nobody's to take
    small = replace(need, peak=Footprint(GIB, 0, 0, 0), borrows=False)
    assert not board.plan(small).placed
    board.drop("borrower")
    assert board.cards["c"].free == 0 and board.cards["c"].left(card.residents[0]) == 80 * GIB


def test_who_borrows_or_leaves_lends_nothing() -> None:
    card = Card("c", "n", "gpu", "A100", 80 * GIB)
    assert card.lendable(resident("a", 40 * GIB)) == 0
    assert card.lendable(resident("a", 40 * GIB, lends=True, releasing=True)) == 0
    assert card.lendable(resident("a", 40 * GIB, lends=True, lender="b", lent=GIB)) == 0


@pytest.mark.parametrize(
    ("kind", "held", "used", "left"),
    [
        ("cpu", 0, 70, 0),
        ("gpu", 5, 25, 5),
        ("gpu", 0, 20, 0),  # as before it was told to end
        ("gpu", 0, 30, 10),  # a zombie's memory, which no process is listed for
    ],
)
def test_memory_is_free_when_the_driver_says_so(kind: str, held: int, used: int, left: int) -> None:
    assert left_behind(kind, 80 * GIB, held * GIB, used * GIB, known=15 * GIB, before=5 * GIB) == left * GIB


def test_cores_are_given_exclusively_while_there_are_free_ones() -> None:
    card = Card("c", "n", "cpu", "EPYC", 64 * GIB, cores=(0, 1, 2, 3))
    assert share_of_cores(card, 0) == ((0, 1, 2, 3), True)
    assert share_of_cores(card, 3) == ((0, 1, 2), True)
    assert share_of_cores(card, 9) == ((0, 1, 2, 3), True)
    card = card.given(resident("a", GIB, cores=(0, 1, 2)))
    assert share_of_cores(card, 0) == ((3,), True)
    assert share_of_cores(card, 2) == ((0, 3), False)
    card = card.given(resident("b", GIB, cores=(3,)))
    assert share_of_cores(card, 0) == ((0, 1, 2, 3), False)
    assert share_of_cores(card, 1) == ((0,), False)
