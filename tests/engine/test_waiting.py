"""WaitingQueue and FairShares: who is next, and that nobody can push ahead for ever."""

from __future__ import annotations

from engine.fairness import FairShares
from engine.sequence import Sequence
from engine.types import FinishReason, SamplingParams, Status
from engine.waiting import WaitingQueue
from tests.engine.test_scheduler import Rig


class Line:
    """A queue, and admissions from it without a scheduler."""

    def __init__(self, expected: int = 10) -> None:
        self.shares = FairShares(expected)
        self.queue = WaitingQueue(self.shares)
        self.next_id = 0

    def add(self, tenant: str, length: int = 10, max_tokens: int = 10, priority: int = 0) -> Sequence:
        params = SamplingParams(max_tokens)
        sequence = Sequence(self.next_id, [1] * length, params, tenant=tenant, priority=priority)
        self.next_id += 1
        self.shares.enter(sequence, self.queue.tenants())
        self.queue.add(sequence)
        return sequence

    def admit(self) -> Sequence:
        sequence = self.queue.head()
        assert sequence is not None
        self.queue.remove(sequence)
        self.shares.admit(sequence)
        sequence.move_to(Status.RUNNING, "SCHEDULED")
        return sequence

    def order(self) -> str:
        return "".join(self.admit().tenant for _ in range(len(self.queue)))


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    line = Line()
    for _ in range(500):
        line.add("a")
    line.admit()
    line.add("b")
    line.add("b")
    assert "".join(line.admit().tenant for _ in range(5)) == "ababa"


def test_tenants_take_turns_by_tokens_not_by_requests() -> None:
    line = Line()
    for _ in range(8):
        line.add("a", length=10)
    for _ in range(3):
        line.add("b", length=50)
    assert line.order() == "abaaabaaaba"


def test_within_a_tenant_and_among_equals_arrival_decides() -> None:
    line = Line()
    for tenant in "bca":
        line.add(tenant)
    assert line.order() == "bca"


def test_priority_comes_before_fairness() -> None:
    line = Line()
    line.add("a")
    line.admit()
    line.add("b", priority=1)
    line.add("a", priority=0)
    assert line.order() == "ab"


def test_the_preempted_come_before_new_ones_of_their_priority() -> None:
    line = Line()
    victim = line.add("a")
    line.admit()
    line.add("b")
    victim.move_to(Status.PREEMPTED, "PREEMPTED")
    line.queue.add(victim)
    line.add("c", priority=-1)
    assert line.queue.num_tokens == 30
    assert line.admit().tenant == "c"
    assert line.queue.head() is victim


def test_who_was_away_starts_level_with_those_who_waited() -> None:
    line = Line()
    for _ in range(4):
        line.add("a")
        line.add("b")
    for _ in range(4):
        line.admit()
    line.add("late")
    line.add("late")
    assert line.order() == "ablateablate"


def test_long_answers_are_charged_and_short_ones_given_back() -> None:
    line = Line(expected=10)
    long, short = line.add("a", max_tokens=100), line.add("b", max_tokens=100)
    line.add("c")
    line.admit()
    line.admit()
    assert line.shares.served("a") == line.shares.served("b") == 20
    for _ in range(30):
        long.append(1)
        line.shares.generated(long)
    short.append(1)
    line.shares.generated(short)
    line.shares.leave(short, admitted=True)
    assert (line.shares.served("a"), line.shares.served("b")) == (10 + 30, 10 + 1)


def test_memory_follows_those_who_are_here() -> None:
    line = Line()
    stay = line.add("stay")
    for number in range(1000):
        sequence = line.add(f"t{number}")
        line.queue.remove(sequence)
        line.shares.leave(sequence, admitted=False)
    assert len(line.shares._served) < 100
    line.queue.remove(stay)
    line.shares.leave(stay, admitted=False)
    assert line.shares._served == {}


def test_a_long_prompt_is_not_overtaken_by_short_ones_for_ever() -> None:
    rig = Rig(num_blocks=8, block_size=4, max_num_seqs=4)
    rig.add(4, max_tokens=8)
    rig.step()
    long = rig.add(28, max_tokens=2)
    for _ in range(20):
        rig.add(4, max_tokens=8)
    while long.status is Status.WAITING:
        rig.step()
    assert len(rig.scheduler.waiting) == 20
    rig.scheduler.abort(range(30), FinishReason.ABORT)
