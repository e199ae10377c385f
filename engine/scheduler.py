"""Which tokens of which sequences the next step computes. Pure: no clock, no torch, no threads."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from engine.blocks import BlockPool
from engine.budget import Budget
from engine.errors import ContextTooLong
from engine.fairness import FairShares
from engine.hostcache import HostCache
from engine.sequence import Sequence
from engine.types import Chunk, FinishReason, Sampled, Status, Step
from engine.waiting import WaitingQueue

Listener = Callable[[Sequence, Sampled, FinishReason | None], bool]
"""Told of each new token and why it ends the sequence, if it does; True ends it as `stop`."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step, of the prefix cache, and of how long an answer fairness expects."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    watermark_blocks: int = 1
    prefix_cache: bool = True
    expected_tokens: int = 128


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since start; tokens are counted once per request, not per preemption."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    host_hit_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    preemptions: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)


class Scheduler:
    """Continuous batching over a block pool, with a host cache behind it.

    `running` is sorted by (priority, arrival). Decodes are served first; as only they take blocks and victims come from
    the tail, a victim is never already in the step. Waiting sequences never preempt running ones.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, host: HostCache | None = None) -> None:
        self.pool = pool
        self.host = host or HostCache(0)
        self.limits = limits
        self.counts = SchedulerCounts()
        self.shares = FairShares(limits.expected_tokens)
        self.waiting = WaitingQueue(self.shares)
        self.running: list[Sequence] = []
        self.compiling: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def has_work(self) -> bool:
        """True while any sequence has not ended."""
        return bool(self._by_id)

    @property
    def can_step(self) -> bool:
        """True unless all there is waits for a grammar; then `schedule` returns a step that computes something."""
        return bool(self.running) or len(self.waiting) > 0

    @property
    def next_deadline(self) -> float | None:
        """When `refresh` has something to end, or None."""
        while self._deadlines and self._deadlines[0][1] not in self._by_id:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ContextTooLong when the pool could never hold it."""
        need = self.pool.blocks_for(sequence.max_total)
        if need > self.pool.num_blocks:
            raise ContextTooLong(f"This request needs {need} KV blocks; the engine has {self.pool.num_blocks}.")
        self._by_id[sequence.id] = sequence
        if sequence.deadline is not None:
            heappush(self._deadlines, (sequence.deadline, sequence.id))
        self.shares.enter(sequence, self.waiting.tenants())
        if sequence.status is Status.WAITING_FOR_GRAMMAR:
            self.compiling.append(sequence)
        else:
            self.waiting.add(sequence)

    def abort(self, ids: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        """End sequences and free their blocks now; unknown or finished ids are ignored."""
        found = [self._by_id[id] for id in ids if id in self._by_id]
        for sequence in found:
            self.finish(sequence, reason)
        return found

    def limit(self, usable: int) -> None:
        """Give out the first `usable` blocks only from now on; the caller leaves the longest sequence room."""
        self.pool.limit(usable)

    def refresh(self, now: float) -> list[Sequence]:
        """Queue those whose grammar is compiled; end and return those whose grammar failed or whose deadline passed."""
        ended = []
        while (due := self.next_deadline) is not None and due <= now:
            ended += self.abort([self._deadlines[0][1]], FinishReason.DEADLINE)
        for sequence in [s for s in self.compiling if s.grammar is None or s.grammar.ready]:
            if sequence.grammar is not None and sequence.grammar.error is not None:
                ended += self.abort([sequence.id], FinishReason.ERROR)
                continue
            self.compiling.remove(sequence)
            sequence.move_to(Status.WAITING, "GRAMMAR_READY")
            self.waiting.add(sequence)
        return ended

    def schedule(self) -> Step:
        """Build the next step; empty only when nothing `can_step`."""
        self.counts.steps += 1
        step = Step(self.counts.steps)
        budget = Budget(self.limits.max_num_batched_tokens)
        self._decode(step, budget)
        self._prefill(step, budget)
        if not step.preempted:
            self._admit_waiting(step, budget)
        self.counts.swapped_out_blocks += len(step.copies_out)
        self.counts.swapped_in_blocks += len(step.copies_in)
        return step

    def complete(
        self, step: Step, sampled: Mapping[int, Sampled], listen: Listener = lambda *_: False
    ) -> list[Sequence]:
        """Commit a computed step; sequences aborted meanwhile get nothing. Returns those whose states are all there."""
        self.host.settle()
        pooled = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING:
                continue
            samples = chunk.samples
            self._advance(chunk)
            if samples:
                self._accept(sequence, sampled[sequence.id], listen)
            elif chunk.completes:
                self.finish(sequence, FinishReason.STOP)
                pooled.append(sequence)
        return pooled

    def fail(self, step: Step) -> list[Sequence]:
        """The device could not do the step: end its sequences, and trust none of its copies."""
        self.host.discard()
        return self.abort([chunk.sequence.id for chunk in step.chunks], FinishReason.ERROR)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and release its blocks."""
        match sequence.status:
            case Status.RUNNING:
                self.running.remove(sequence)
            case Status.WAITING_FOR_GRAMMAR:
                self.compiling.remove(sequence)
            case _:
                self.waiting.remove(sequence)
        self.shares.leave(sequence, admitted=sequence.status in (Status.RUNNING, Status.PREEMPTED))
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
        """Raise AssertionError unless free + referenced = total, here and on the host; cheap enough when idle."""
        self.pool.check(sequence.block_table for sequence in self._by_id.values())
        self.host.check()
        waiting = len(self.waiting) + len(self.compiling)
        assert len(self._by_id) == len(self.running) + waiting, "a sequence is lost"
        assert self.running == sorted(self.running, key=lambda s: s.order), "running is unsorted"
        tokens = [s.num_tokens for s in self.waiting]
        assert (len(self.waiting), self.waiting.num_tokens) == (len(tokens), sum(tokens)), "the queue is miscounted"

    def _decode(self, step: Step, budget: Budget) -> None:
        """Give every sequence with one token to compute that token, taking blocks as needed."""
        index = 0
        while index < len(self.running) and budget.tokens > 0:
            sequence = self.running[index]
            if sequence.remaining == 1:
                if not self._make_room(sequence, step):
                    break
                step.chunks.append(Chunk(sequence, sequence.num_computed, 1))
                step.decode_tokens += 1
                budget.spend(sequence.num_computed, 1)
            index += 1

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Ensure a block for the next token, preempting from the tail; False if itself fell."""
        missing = self.pool.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        while missing > self.pool.num_free:
            victim = self.running.pop()
            self._preempt(victim, step)
            if victim is sequence:
                return False
        sequence.block_table += self._take(missing, step)
        return True

    def _preempt(self, victim: Sequence, step: Step) -> None:
        """Free a sequence's blocks; what the host has or takes of them need not be computed again."""
        digests = self._digests(victim, victim.num_computed)
        pairs = zip(victim.block_table, digests, strict=False)
        copied = sum([self._copy_out(step, block, digest) for block, digest in pairs])
        kind = "swap" if digests and digests[0] in self.host else "recompute"
        self._release(victim)
        victim.num_computed = 0
        victim.preemptions += 1
        self.counts.preemptions[kind] += 1
        victim.move_to(Status.PREEMPTED, "PREEMPTED", reason="no free block for decode", kind=kind)
        if copied:
            victim.note("SWAPPED_OUT", blocks=copied)
        self.waiting.add(victim)
        step.preempted.append(victim)

    def _prefill(self, step: Step, budget: Budget) -> None:
        """Continue prompts already admitted; they hold all their blocks, so nothing is taken."""
        for sequence in self.running:
            if budget.tokens == 0:
                break
            if sequence.remaining > 1:
                self._add_chunk(step, sequence, budget)

    def _add_chunk(self, step: Step, sequence: Sequence, budget: Budget) -> None:
        start = sequence.num_computed
        count = budget.fitting(start, sequence.remaining)
        budget.spend(start, count)
        step.chunks.append(Chunk(sequence, start, count))
        sequence.note("CHUNK", tokens=count, start=start)

    def _admit_waiting(self, step: Step, budget: Budget) -> None:
        while budget.tokens > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting.head()
            if sequence is None or not self._take_prompt_blocks(sequence, step):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.order)
            self._note_admission(sequence, step)
            self._add_chunk(step, sequence, budget)

    def _take_prompt_blocks(self, sequence: Sequence, step: Step) -> bool:
        """Take every block of the known tokens at once, so chunks never allocate.

        Cached blocks are looked up on the device, and from where those end on the host. One in the free list counts
        against the free total. The last token is always computed, because its logits are needed: hence the cap on hits.
        """
        pool = self.pool
        digests = self._digests(sequence, sequence.num_tokens - 1)
        hits = pool.match(digests)
        need = pool.blocks_for(sequence.num_tokens) - len(hits)
        watermark = max(self.limits.watermark_blocks, pool.usable // 100) if self.running else 0
        if pool.num_free - pool.count_free(hits) - need < watermark:
            return False
        pool.hold(hits)
        slots = self.host.match(digests[len(hits) :])
        # Before blocks are taken: what they held may move to the host, and must not push out what is wanted from there.
        self.host.pin(digests[len(hits) : len(hits) + len(slots)])
        fresh = self._take(need, step)
        step.copies_in += zip(slots, fresh, strict=False)
        sequence.block_table = hits + fresh
        sequence.num_published = len(hits)
        sequence.num_computed = (len(hits) + len(slots)) * pool.block_size
        return True

    def _note_admission(self, sequence: Sequence, step: Step) -> None:
        first = sequence.status is Status.WAITING
        on_host = sequence.num_computed - sequence.num_published * self.pool.block_size
        if first:
            sequence.num_cached, sequence.num_cached_host = sequence.num_computed, on_host
            self._count_admission(sequence)
        step.admitted += 1
        step.cached_tokens += sequence.num_computed
        sequence.move_to(
            Status.RUNNING,
            "SCHEDULED" if first else "RESUMED",
            cached_tokens=sequence.num_computed,
            host_tokens=on_host,
            step=step.index,
            running=len(self.running),
            waiting=len(self.waiting),
        )
        if on_host:
            sequence.note("SWAPPED_IN", blocks=on_host // self.pool.block_size)

    def _count_admission(self, sequence: Sequence) -> None:
        counts = self.counts
        self.shares.admit(sequence)
        counts.prompt_tokens += sequence.num_prompt
        if self.limits.prefix_cache and sequence.reuses_prefix:
            counts.prefix_query_tokens += sequence.num_prompt
            counts.prefix_hit_tokens += sequence.num_cached
            counts.host_hit_tokens += sequence.num_cached_host

    def _advance(self, chunk: Chunk) -> None:
        """Move past the chunk; publish what it completed, or brought from the host, only now that it is real."""
        sequence, full = chunk.sequence, chunk.end // self.pool.block_size
        sequence.num_computed = chunk.end
        if self.limits.prefix_cache and full > sequence.num_published:
            hashes = sequence.block_hashes(self.pool.block_size)
            for index in range(sequence.num_published, full):
                self.pool.publish(sequence.block_table[index], hashes[index])
            sequence.num_published = full

    def _accept(self, sequence: Sequence, sampled: Sampled, listen: Listener) -> None:
        reason = sequence.append(sampled.token_id)
        self.counts.generation_tokens += 1
        self.shares.generated(sequence)
        if listen(sequence, sampled, reason):
            reason = FinishReason.STOP
        if reason is not None:
            self.finish(sequence, reason)

    def _digests(self, sequence: Sequence, tokens: int) -> list[bytes]:
        """Hashes of the full blocks of a sequence's first tokens; none where nothing may be found again."""
        size = self.pool.block_size
        if not self.limits.prefix_cache or not sequence.reuses_prefix:
            return []
        return sequence.block_hashes(size)[: tokens // size]

    def _take(self, count: int, step: Step) -> list[int]:
        return self.pool.take(count, lambda block, digest: self._copy_out(step, block, digest))

    def _copy_out(self, step: Step, block: int, digest: bytes) -> bool:
        """Save a block on the host, unless it is there or the host has no room for it."""
        slot = self.host.store(digest)
        if slot is not None:
            step.copies_out.append((block, slot))
        return slot is not None

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
