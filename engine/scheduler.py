"""Which tokens of which sequences the next step computes. Pure: no clock, no torch, no threads."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from engine.blocks import BlockPool
from engine.errors import ContextTooLong
from engine.sequence import Sequence
from engine.types import Chunk, FinishReason, Sampled, Status, Step

Listener = Callable[[Sequence, Sampled, FinishReason | None], bool]
"""Told of each new token and why it ends the sequence, if it does; True ends it as `stop`."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step, and of the prefix cache."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    watermark_blocks: int = 1
    prefix_cache: bool = True


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since start; tokens are counted once per request, not per preemption."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class Scheduler:
    """Continuous batching over a block pool.

    `running` and `waiting` are sorted by (priority, arrival). Decodes are served first; as only
    they take blocks and victims come from the tail, a victim is never already in the step.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.counts = SchedulerCounts()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self._by_id)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ContextTooLong when the pool could never hold it."""
        need = self.pool.blocks_for(sequence.max_total)
        if need > self.pool.num_blocks:
            raise ContextTooLong(f"This request needs {need} KV blocks; the engine has {self.pool.num_blocks}.")
        self._by_id[sequence.id] = sequence
        insort(self.waiting, sequence, key=lambda s: s.order)

    def abort(self, ids: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        """End sequences and free their blocks now; unknown or finished ids are ignored."""
        found = [self._by_id[id] for id in ids if id in self._by_id]
        for sequence in found:
            self.finish(sequence, reason)
        return found

    def schedule(self) -> Step:
        """Build the next step; empty only when there is no work."""
        self.counts.steps += 1
        step = Step(self.counts.steps)
        budget = self._decode(step, self.limits.max_num_batched_tokens)
        budget = self._prefill(step, budget)
        if not step.preempted:
            self._admit_waiting(step, budget)
        return step

    def complete(self, step: Step, sampled: Mapping[int, Sampled], listen: Listener = lambda *_: False) -> None:
        """Commit a computed step; sequences aborted meanwhile get nothing."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING:
                continue
            samples = chunk.samples
            self._advance(chunk)
            if samples:
                self._accept(sequence, sampled[sequence.id], listen)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and release its blocks."""
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        del self._by_id[sequence.id]
        self._release(sequence)
        sequence.finish_reason = reason
        sequence.move_to(
            Status.FINISHED,
            "FINISHED",
            reason=reason.value,
            completion_tokens=sequence.num_output,
        )
        self.counts.finished[reason.value] += 1

    def check(self) -> None:
        """Raise AssertionError unless free + referenced = total; cheap enough when idle."""
        self.pool.check(sequence.block_table for sequence in self._by_id.values())
        assert len(self._by_id) == len(self.running) + len(self.waiting), "a sequence is lost"
        assert self.running == sorted(self.running, key=lambda s: s.order), "running is unsorted"

    def _decode(self, step: Step, budget: int) -> int:
        """Give every sequence with one token to compute that token, taking blocks as needed."""
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.remaining == 1:
                if not self._make_room(sequence, step):
                    break
                step.chunks.append(Chunk(sequence, sequence.num_computed, 1))
                budget -= 1
            index += 1
        return budget

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Ensure a block for the next token, preempting from the tail; False if itself fell."""
        missing = self.pool.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        while missing > self.pool.num_free:
            victim = self.running.pop()
            self._preempt(victim, step)
            if victim is sequence:
                return False
        sequence.block_table += self.pool.take(missing)
        return True

    def _preempt(self, victim: Sequence, step: Step) -> None:
        self._release(victim)
        victim.num_computed = 0
        victim.preemptions += 1
        self.counts.preemptions += 1
        victim.move_to(Status.PREEMPTED, "PREEMPTED", reason="no free block for decode")
        insort(self.waiting, victim, key=lambda s: s.order)
        step.preempted.append(victim)

    def _prefill(self, step: Step, budget: int) -> int:
        """Continue prompts already admitted; they hold all their blocks, so nothing is taken."""
        for sequence in self.running:
            if budget == 0:
                break
            if sequence.remaining > 1:
                budget -= self._add_chunk(step, sequence, budget)
        return budget

    def _add_chunk(self, step: Step, sequence: Sequence, budget: int) -> int:
        count = min(sequence.remaining, budget)
        step.chunks.append(Chunk(sequence, sequence.num_computed, count))
        sequence.note("CHUNK", tokens=count, start=sequence.num_computed)
        return count

    def _admit_waiting(self, step: Step, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if not self._take_prompt_blocks(sequence):
                break
            self.waiting.pop(0)
            insort(self.running, sequence, key=lambda s: s.order)
            self._note_admission(sequence, step)
            budget -= self._add_chunk(step, sequence, budget)

    def _take_prompt_blocks(self, sequence: Sequence) -> bool:
        """Take every block of the known tokens at once, so chunks never allocate.

        A cached block in the free list counts against the free total. The last token is always
        computed, because its logits are needed: hence the cap on hits.
        """
        pool = self.pool
        hits: list[int] = []
        if self.limits.prefix_cache:
            cap = (sequence.num_tokens - 1) // pool.block_size
            hits = pool.match(sequence.block_hashes(pool.block_size)[:cap])
        need = pool.blocks_for(sequence.num_tokens) - len(hits)
        watermark = self.limits.watermark_blocks if self.running else 0
        if pool.num_free - pool.count_free(hits) - need < watermark:
            return False
        pool.hold(hits)
        sequence.block_table = hits + pool.take(need)
        sequence.num_computed = len(hits) * pool.block_size
        return True

    def _note_admission(self, sequence: Sequence, step: Step) -> None:
        first = sequence.status is Status.WAITING
        if first:
            sequence.num_cached = sequence.num_computed
            self.counts.prompt_tokens += sequence.num_prompt
            if self.limits.prefix_cache:
                self.counts.prefix_query_tokens += sequence.num_prompt
                self.counts.prefix_hit_tokens += sequence.num_cached
        sequence.move_to(
            Status.RUNNING,
            "SCHEDULED" if first else "RESUMED",
            cached_tokens=sequence.num_computed,
            step=step.index,
            running=len(self.running),
            waiting=len(self.waiting),
        )

    def _advance(self, chunk: Chunk) -> None:
        """Move past the chunk and publish the blocks it completed, only now that they are real."""
        sequence, size = chunk.sequence, self.pool.block_size
        sequence.num_computed = chunk.end
        if self.limits.prefix_cache and chunk.end // size > chunk.start // size:
            hashes = sequence.block_hashes(size)
            for index in range(chunk.start // size, chunk.end // size):
                self.pool.publish(sequence.block_table[index], hashes[index])

    def _accept(self, sequence: Sequence, sampled: Sampled, listen: Listener) -> None:
        reason = sequence.append(sampled.token_id)
        self.counts.generation_tokens += 1
        if listen(sequence, sampled, reason):
            reason = FinishReason.STOP
        if reason is not None:
            self.finish(sequence, reason)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
