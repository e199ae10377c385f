"""Scheduler: order, budget, chunking, preemption, rejection, timeline."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool
from engine.errors import ContextTooLong
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.types import FinishReason, SamplingParams, Status, Step
from tests.engine.fakes import HashRunner


class Rig:
    """A scheduler with the hash runner behind it."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4, **limits: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | limits
        self.scheduler = Scheduler(self.pool, SchedulerLimits(**settings))
        self.runner = HashRunner(num_blocks, block_size)
        self.next_id = 0

    def add(self, length: int, max_tokens: int = 4, priority: int = 0) -> Sequence:
        prompt = [(self.next_id * 7 + at) % 50 for at in range(length)]
        sequence = Sequence(self.next_id, prompt, SamplingParams(max_tokens), priority=priority)
        self.next_id += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.complete(step, self.runner.sample(step, self.runner.forward(step)))
        self.scheduler.check()
        return step

    def shape(self, step: Step) -> list[tuple[int, int]]:
        return [(chunk.sequence.id, chunk.count) for chunk in step.chunks]


def names(sequence: Sequence) -> list[str]:
    return [event[0] for event in sequence.timeline.as_list()]


def test_a_long_prompt_is_cut_to_the_budget_and_decodes_go_first() -> None:
    rig = Rig()
    rig.add(3)
    rig.step()
    rig.add(30)
    assert rig.shape(rig.step()) == [(0, 1), (1, 15)]
    assert rig.shape(rig.step()) == [(0, 1), (1, 15)]


def test_what_could_never_fit_is_refused_at_once() -> None:
    rig = Rig(num_blocks=4)
    with pytest.raises(ContextTooLong, match="needs 5 KV blocks; the engine has 4"):
        rig.add(10, max_tokens=8)
    rig.add(10, max_tokens=7)


def test_lower_priority_values_go_first_then_arrival() -> None:
    rig = Rig(max_num_seqs=2)
    for priority in (1, 0, 0):
        rig.add(3, priority=priority)
    assert rig.shape(rig.step()) == [(1, 3), (2, 3)]


def test_the_youngest_is_preempted_when_blocks_run_out_and_resumes() -> None:
    rig = Rig(num_blocks=5, max_num_seqs=4)
    old, young = rig.add(8, max_tokens=8), rig.add(4, max_tokens=12)
    while young.status is not Status.PREEMPTED:
        rig.step()
    assert old.preemptions == 0
    assert young.block_table == []
    while rig.scheduler.has_work:
        rig.step()
    assert names(young).count("PREEMPTED") == young.preemptions >= 1
    assert "RESUMED" in names(young)
    assert rig.scheduler.counts.preemptions.total() == young.preemptions
    assert rig.pool.num_free == 5


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    rig = Rig(num_blocks=5, max_num_seqs=4)
    rig.add(8, max_tokens=8)
    rig.add(4, max_tokens=12)
    step = rig.step()
    while not step.preempted:
        step = rig.step()
    assert len(step.chunks) == 1


def test_admission_leaves_a_block_for_those_who_run() -> None:
    rig = Rig(num_blocks=4, block_size=4)
    rig.add(6)
    waiting = rig.add(8)
    rig.step()
    assert waiting.status is Status.WAITING


def test_an_abort_frees_blocks_at_once_and_later_ones_are_ignored() -> None:
    rig = Rig()
    sequence = rig.add(9)
    rig.step()
    assert rig.scheduler.abort([sequence.id]) == [sequence]
    assert rig.pool.num_free == 16
    assert rig.scheduler.abort([sequence.id, 77]) == []
    assert sequence.finish_reason is FinishReason.ABORT
    assert rig.scheduler.counts.finished == {"abort": 1}


def test_an_abort_during_the_forward_pass_yields_no_token() -> None:
    rig = Rig()
    sequence = rig.add(5)
    step = rig.scheduler.schedule()
    computed = rig.runner.forward(step)
    rig.scheduler.abort([sequence.id])
    rig.scheduler.complete(step, rig.runner.sample(step, computed))
    assert sequence.num_output == 0
    assert rig.scheduler.counts.generation_tokens == 0
    assert rig.pool.match(sequence.block_hashes(4)) == [], "an unfinished block was published"


def test_every_status_change_leaves_an_event_with_its_reason() -> None:
    rig = Rig()
    sequence = rig.add(20, max_tokens=2)
    while rig.scheduler.has_work:
        rig.step()
    assert names(sequence) == ["SCHEDULED", "CHUNK", "CHUNK", "FIRST_TOKEN", "FINISHED"]
    last = sequence.timeline.as_list()[-1]
    assert last[2] == {"reason": "length", "completion_tokens": 2}


def test_a_listener_can_end_a_sequence_as_stop() -> None:
    rig = Rig()
    sequence = rig.add(5, max_tokens=9)
    step = rig.scheduler.schedule()
    sampled = rig.runner.sample(step, rig.runner.forward(step))
    rig.scheduler.complete(step, sampled, lambda s, token, reason: True)
    assert sequence.finish_reason is FinishReason.STOP
    assert rig.pool.num_free == 16


def test_min_tokens_outlives_a_stop_token() -> None:
    params = SamplingParams(5, stop_token_ids=frozenset([7]), min_tokens=2)
    sequence = Sequence(0, [1], params)
    assert sequence.append(7) is None
    assert sequence.append(7) is None
    assert sequence.append(7) is FinishReason.STOP


def test_a_timeline_is_bounded_but_keeps_its_end() -> None:
    rig = Rig()
    sequence = rig.add(5, max_tokens=1)
    for _ in range(300):
        sequence.note("CHUNK", tokens=1)
    rig.step()
    assert sequence.timeline.dropped > 40
    assert names(sequence)[-1] == "FINISHED"
