"""Scheduler: order, budget, chunking, preemption, rejection, timeline."""

from __future__ import annotations

from typing import Any

import pytest

from engine.blocks import BlockPool
from engine.errors import ContextTooLong
from engine.hostcache import HostCache
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.types import FinishReason, SamplingParams, Status, Step
from tests.engine.fakes import EvenGrammar, HashRunner, masks_of, oracle


class Rig:
    """A scheduler with the hash runner behind it."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4, num_host: int = 0, **limits: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | limits
        self.scheduler = Scheduler(self.pool, SchedulerLimits(**settings), HostCache(num_host))
        self.runner = HashRunner(num_blocks, block_size, num_host)
        self.next_id = 0

    def add(self, length: int, max_tokens: int = 4, **settings: Any) -> Sequence:
        return self.add_prompt([(self.next_id * 7 + at) % 50 for at in range(length)], max_tokens, **settings)

    def add_prompt(self, prompt: list[int], max_tokens: int, **settings: Any) -> Sequence:
        sequence = Sequence(self.next_id, prompt, SamplingParams(max_tokens), **settings)
        self.next_id += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.complete(step)
        return step

    def complete(self, step: Step) -> None:
        computed = self.runner.forward(step)
        self.scheduler.complete(step, self.runner.sample(step, computed, masks_of(step)))
        self.scheduler.check()

    def shape(self, step: Step) -> list[tuple[int, int]]:
        return [(chunk.sequence.id, chunk.count) for chunk in step.chunks]


def names(sequence: Sequence) -> list[str]:
    return [event[0] for event in sequence.timeline.as_list()]


def args(sequence: Sequence, name: str) -> dict[str, Any]:
    return next(dict(event[2]) for event in sequence.timeline.as_list() if event[0] == name)


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


def crowded(num_host: int) -> tuple[Rig, Sequence]:
    """Two sequences in a pool that holds one of them to its end; returns the one that was preempted."""
    rig = Rig(num_blocks=8, max_num_seqs=2, num_host=num_host)
    rig.add(8, max_tokens=20)
    young = rig.add(14, max_tokens=12)
    while young.status is not Status.PREEMPTED:
        rig.step()
    return rig, young


def finish(rig: Rig) -> None:
    while rig.scheduler.has_work:
        rig.step()


def test_a_preempted_sequence_moves_to_the_host_and_back() -> None:
    rig, young = crowded(num_host=16)
    known = young.num_tokens
    assert args(young, "PREEMPTED") == {"reason": "no free block for decode", "kind": "swap"}
    assert args(young, "SWAPPED_OUT") == {"blocks": (known - 1) // 4}
    finish(rig)
    assert names(young).count("RESUMED") == young.preemptions == 1
    resumed = args(young, "RESUMED")
    assert resumed["cached_tokens"] == (known - 1) // 4 * 4
    assert args(young, "SWAPPED_IN") == {"blocks": resumed["host_tokens"] // 4}
    assert resumed["host_tokens"] > 0
    chunks = [event[2] for event in young.timeline.as_list() if event[0] == "CHUNK"]
    assert chunks[-1] == {"tokens": known - resumed["cached_tokens"], "start": resumed["cached_tokens"]}
    assert rig.scheduler.counts.preemptions == {"swap": 1}
    assert young.tokens[young.num_prompt :] == oracle(young.tokens[: young.num_prompt], 12)


def test_without_a_host_it_is_recomputed() -> None:
    rig, young = crowded(num_host=0)
    assert args(young, "PREEMPTED")["kind"] == "recompute"
    finish(rig)
    assert "SWAPPED_OUT" not in names(young)
    assert "SWAPPED_IN" not in names(young)
    assert rig.scheduler.counts.preemptions == {"recompute": 1}


def test_a_shared_prefix_that_leaves_the_device_is_found_on_the_host() -> None:
    rig = Rig(num_blocks=8, num_host=8)
    shared = list(range(12))
    for _ in range(2):
        rig.add_prompt([*shared, 90 + rig.next_id], max_tokens=1)
        finish(rig)
    rig.add(32, max_tokens=1)
    finish(rig)
    assert rig.pool.match(Sequence(9, shared, SamplingParams(1)).block_hashes(4)) == []
    third = rig.add_prompt([*shared, 95], max_tokens=1)
    finish(rig)
    assert (third.num_cached, third.num_cached_host) == (12, 12)
    assert args(third, "SWAPPED_IN") == {"blocks": 3}
    assert rig.scheduler.counts.host_hit_tokens == 12


def test_a_prompt_nobody_repeated_is_not_copied() -> None:
    rig = Rig(num_blocks=8, num_host=8)
    for _ in range(4):
        rig.add(30, max_tokens=1)
        finish(rig)
    assert rig.pool.evictions > 0
    assert rig.scheduler.counts.swapped_out_blocks == 0


def test_a_failed_step_ends_its_sequences_and_what_it_copied_is_not_believed() -> None:
    rig, young = crowded(num_host=16)
    step = rig.scheduler.schedule()
    while not step.copies_in:
        rig.complete(step)
        step = rig.scheduler.schedule()
    assert rig.scheduler.fail(step) == [chunk.sequence for chunk in step.chunks]
    assert young.finish_reason is FinishReason.ERROR
    assert rig.pool.num_free == 8
    rig.scheduler.check()


def test_a_deadline_ends_a_sequence_wherever_it_stands() -> None:
    rig = Rig(max_num_seqs=1)
    running = rig.add(5, max_tokens=50, deadline=10.0)
    waiting = rig.add(5, deadline=9.0)
    compiling = rig.add(5, deadline=9.5, grammar=EvenGrammar(1, ready=False))
    ended = rig.add(5, deadline=1.0)
    rig.scheduler.abort([ended.id])
    rig.step()
    assert rig.scheduler.next_deadline == 9.0
    assert rig.scheduler.refresh(8.0) == []
    assert rig.scheduler.refresh(9.5) == [waiting, compiling]
    assert rig.scheduler.refresh(10.0) == [running]
    assert running.finish_reason is FinishReason.DEADLINE
    assert rig.pool.num_free == 16
    assert (rig.scheduler.next_deadline, rig.scheduler.has_work) == (None, False)


def test_a_sequence_waiting_for_its_grammar_blocks_nobody() -> None:
    rig = Rig()
    grammar = EvenGrammar(2, ready=False)
    first = rig.add(5, max_tokens=3, grammar=grammar)
    assert (first.status, rig.scheduler.can_step) == (Status.WAITING_FOR_GRAMMAR, False)
    rig.add(5)
    finish_but_compiling(rig)
    grammar.ready = True
    assert rig.scheduler.refresh(0.0) == []
    assert first.status is Status.WAITING
    finish(rig)
    assert names(first)[0] == "GRAMMAR_READY"
    assert first.tokens[5:] == oracle(first.tokens[:5], 3, grammar=EvenGrammar(2))


def test_a_grammar_that_failed_ends_its_sequence() -> None:
    rig = Rig()
    grammar = EvenGrammar(2, ready=False)
    sequence = rig.add(5, grammar=grammar)
    grammar.error, grammar.ready = "no such thing", True
    assert rig.scheduler.refresh(0.0) == [sequence]
    assert sequence.finish_reason is FinishReason.ERROR
    assert not rig.scheduler.has_work


def finish_but_compiling(rig: Rig) -> None:
    while rig.scheduler.can_step:
        rig.step()
