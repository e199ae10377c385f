"""Rollouts in a world that starts, loads, fails and drains at random: what holds at every step, and where it ends.

The world does what the controller does: it writes plan's steps into rows, and moves the rollout by turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from console.fleet import replicas, rollout
from console.fleet.models import Replica, Rollout
from console.fleet.replicas import Drain, Have, Start
from console.fleet.rollout import Going

State = Replica.State
HOLDS = {State.STARTING, State.LOADING, State.VERIFYING, State.READY, State.DRAINING, State.HUNG}
NEXT = {State.STARTING: State.LOADING, State.LOADING: State.VERIFYING, State.VERIFYING: State.READY}


@dataclass
class World:
    """Replicas by number, on devices that hold `room` workers at once."""

    chance: Random
    room: int
    bad: frozenset[int] = frozenset()  # revisions whose workers never come up
    desired: int = 2
    revision: int = 1
    verified: set[int] = field(default_factory=set)
    rows: dict[int, Have] = field(default_factory=dict)
    going: Going | None = None
    ended: list[str] = field(default_factory=list)
    calm: bool = True  # nothing fails but bad revisions

    def tick(self) -> None:
        """The controller looks once; then the world goes on a little."""
        self._roll()
        dip = self.going is not None and self.going.strategy == Rollout.Strategy.DIP
        before, wanted = self._ready(), self._wanted()
        for step in replicas.plan(self.desired, self.revision, list(self.rows.values()), dip):
            self._apply(step)
        self._check(before, dip)
        assert self._wanted() <= max(self.desired + 1, wanted), "at most one more than wanted is started"
        for row in list(self.rows.values()):
            self.rows[row.ordinal] = self._live(replace(row, in_state_s=row.in_state_s + 20))

    def _roll(self) -> None:
        rows = list(self.rows.values())
        if self.going is None:
            if rollout.begins(self.desired, self.revision, rows) is not None:
                self.going = Going(Rollout.State.RUNNING, Rollout.Strategy.SURGE, self.revision)
            return
        strategy = rollout.strategy_of(self.going, rows, self.revision)
        self.going = replace(self.going, strategy=strategy)
        found = rollout.turn(self.going, self.desired, self.revision, rows, self.verified)
        if found is None:
            return
        if found.target is not None:
            self.revision = found.target
            self.going = replace(self.going, state=found.state, back_to=found.target)
        else:
            self.ended.append(found.state)
            self.going = None

    def _apply(self, step: replicas.Step) -> None:
        row = self.rows.get(step.ordinal)
        if isinstance(step, Drain):
            assert row is not None
            assert row.wanted
            left = State.STOPPED if row.state in {State.PENDING, State.FAILED} else State.DRAINING
            self.rows[step.ordinal] = replace(row, wanted=False, state=left, in_state_s=0, refused=False)
            return
        assert row is None or (row.state == State.STOPPED and not row.wanted), "a number has one worker at a time"
        self.rows[step.ordinal] = Have(step.ordinal, step.revision, State.PENDING)

    def _check(self, ready_before: int, dip: bool) -> None:
        """What the controller itself takes away is never more than one below what is wanted."""
        if self._ready() < ready_before:
            refused = any(row.refused for row in self.rows.values())
            floor = self.desired - (1 if dip or refused else 0)
            assert self._ready() >= floor, (floor, self.rows)

    def _live(self, row: Have) -> Have:
        if self.chance.random() < 0.3:
            return row
        if row.is_leaving:
            return replace(row, state=State.STOPPED, in_state_s=0)
        if row.state in {State.PENDING, State.FAILED} and row.wanted:
            holding = sum(each.state in HOLDS for each in self.rows.values())
            full = holding >= self.room
            if full or (row.state == State.FAILED and self.chance.random() < 0.5):
                return replace(row, refused=full and row.state == State.PENDING)
            return replace(row, state=State.STARTING, refused=False, in_state_s=0)
        if row.state in NEXT:
            if row.revision in self.bad or (not self.calm and self.chance.random() < 0.1):
                return replace(row, state=State.FAILED, failures=row.failures + 1, in_state_s=0)
            if NEXT[State(row.state)] == State.READY:
                self.verified.add(row.revision)
                return replace(row, state=State.READY, failures=0, in_state_s=0)
            return replace(row, state=NEXT[State(row.state)], in_state_s=0)
        if row.state == State.READY and not self.calm and self.chance.random() < 0.02:
            return replace(row, state=State.FAILED, failures=1, in_state_s=0)
        return row

    def _ready(self) -> int:
        return sum(row.is_ready for row in self.rows.values())

    def _wanted(self) -> int:
        return sum(row.wanted for row in self.rows.values())

    @property
    def settled(self) -> bool:
        active = [row for row in self.rows.values() if row.wanted]
        at_one = all(row.is_ready and row.revision == self.revision and not row.tired for row in active)
        return at_one and len(active) == self.desired and self.going is None

    def until_settled(self, ticks: int = 400) -> None:
        for _ in range(ticks):
            self.tick()
            if self.settled:
                return
        raise AssertionError(f"not settled: {self.rows} {self.going} {self.ended}")


SEEDS = st.integers(0, 2**32)


@given(SEEDS, st.integers(1, 4), st.integers(0, 2))
def test_a_rollout_ends_with_exactly_what_is_wanted_at_the_new_revision(seed: int, desired: int, spare: int) -> None:
    world = World(Random(seed), room=desired + spare, desired=desired)
    world.until_settled()
    world.revision = 2
    lowest = desired
    for _ in range(400):
        world.tick()
        lowest = min(lowest, world._ready())
        if world.settled:
            break
    assert world.settled
    assert world.ended == [Rollout.State.DONE]
    assert lowest >= (desired if spare else desired - 1), "surge never goes below what is wanted, dip by one at most"


@given(SEEDS, st.integers(1, 3), st.integers(0, 2))
def test_a_revision_that_never_comes_up_is_rolled_back(seed: int, desired: int, spare: int) -> None:
    world = World(Random(seed), room=desired + spare, desired=desired, bad=frozenset({2}))
    world.until_settled()
    world.revision = 2
    world.until_settled()
    assert world.revision == 1
    assert world.ended == [Rollout.State.ROLLED_BACK]
    if spare:
        assert all(row.state == State.READY for row in world.rows.values() if row.wanted)


@given(SEEDS)
def test_without_a_verified_revision_there_is_nothing_to_go_back_to(seed: int) -> None:
    world = World(Random(seed), room=3, bad=frozenset({1, 2}))
    for _ in range(50):
        world.tick()
    world.revision = 2
    for _ in range(100):
        world.tick()
    assert world.ended == [Rollout.State.FAILED]
    assert world.revision == 2


@given(SEEDS, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.booleans()), max_size=8))
@settings(max_examples=200)
def test_whatever_is_wanted_meanwhile_it_converges(seed: int, changes: list[tuple[int, int, bool]]) -> None:
    """Numbers and revisions change at any moment, workers die at any moment; when that stops, it settles."""
    world = World(Random(seed), room=5, calm=False)
    for pause, desired, revise in changes:
        for _ in range(pause):
            world.tick()
        world.desired = desired
        world.revision += revise
    world.calm = True
    world.until_settled()
    assert len([row for row in world.rows.values() if row.wanted]) == world.desired


@given(SEEDS, st.integers(1, 3), st.booleans())
def test_tired_replicas_are_replaced_one_at_a_time(seed: int, desired: int, room: bool) -> None:
    world = World(Random(seed), room=desired + room, desired=desired)
    world.until_settled()
    tired = {number: replace(row, tired="1,000 requests served") for number, row in world.rows.items() if row.wanted}
    world.rows |= tired
    lowest = desired
    for _ in range(400):
        world.tick()
        lowest = min(lowest, world._ready())
        if world.settled:
            break
    assert world.settled
    assert lowest >= desired - (not room)
    assert world.ended == [], "recycling is no rollout"


def test_a_number_is_used_again_once_its_worker_is_gone() -> None:
    rows = [Have(1, 1, State.READY), Have(2, 1, State.STOPPED, wanted=False), Have(3, 1, State.DRAINING, wanted=False)]
    assert replicas.plan(3, 1, rows) == [Start(2, 1, "3 wanted at revision 1"), Start(4, 1, "3 wanted at revision 1")]


def test_fewer_takes_those_that_serve_nobody_first() -> None:
    rows = [Have(1, 1, State.FAILED), Have(2, 1, State.READY), Have(3, 1, State.LOADING), Have(4, 1, State.READY)]
    assert [step.ordinal for step in replicas.plan(2, 1, rows)] == [1, 3]
    assert replicas.plan(2, 1, rows)[0].why == "Its deployment wants 2 instead of 4"


def test_a_revision_for_which_there_is_no_room_even_after_one_has_gone_is_given_up() -> None:
    gone = Have(1, 1, State.STOPPED, wanted=False, in_state_s=rollout.UNPLACED_S + 1)
    waits = Have(2, 2, State.PENDING, refused=True, in_state_s=rollout.UNPLACED_S + 9)
    going = Going(Rollout.State.RUNNING, Rollout.Strategy.DIP, 2)
    found = rollout.turn(going, 1, 2, [gone, waits], {1})
    assert found is not None
    assert (found.state, found.target) == (Rollout.State.ROLLING_BACK, 1)
    assert "r2 found no room at revision 2" in found.reason
    assert rollout.turn(going, 1, 2, [replace(gone, in_state_s=1), waits], {1}) is None, "its memory may be freed yet"
    assert rollout.turn(going, 1, 2, [gone, replace(waits, refused=False)], {1}) is None
    none = rollout.turn(going, 1, 2, [gone, waits], set())
    assert none is not None
    assert none.state == Rollout.State.FAILED
    again = rollout.turn(replace(going, state=Rollout.State.ROLLING_BACK, back_to=2), 1, 2, [gone, waits], {2})
    assert again is not None
    assert again.state == Rollout.State.FAILED
    assert "cannot be served again either" in again.reason


def test_a_rollout_of_what_is_stopped_meanwhile_is_none_any_more() -> None:
    going = Going(Rollout.State.RUNNING, Rollout.Strategy.SURGE, 2)
    found = rollout.turn(going, 0, 2, [Have(1, 1, State.STOPPED, wanted=False)], {1})
    assert found is not None
    assert (found.state, found.reason) == (Rollout.State.SUPERSEDED, "No replica is wanted any more")
    assert rollout.turn(going, 1, 3, [], {1}).state == Rollout.State.SUPERSEDED  # type: ignore[union-attr]
