"""Random schedules of the pure core, played with every invariant checked after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from engine.blocks import BlockPool
from engine.hostcache import HostCache
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence, hash_root
from engine.types import FinishReason, SamplingParams, Status, Step
from tests.engine.fakes import EvenGrammar, HashRunner, masks_of, oracle

ENDED_EARLY = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)


class Draw(Protocol):
    """The part of random.Random that a scenario is drawn with; hypothesis has one too."""

    def randint(self, low: int, high: int) -> int: ...


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario; times are step numbers."""

    step: int
    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    tenant: str
    priority: int
    abort_at: int | None
    abort_mid_step: bool
    deadline: int | None
    grammar_length: int | None
    grammar_ready: int
    grammar_fails: bool


@dataclass(frozen=True)
class Scenario:
    """Pools, limits, what arrives, at which steps the device fails, and when some of the pool is lent."""

    num_blocks: int
    block_size: int
    num_host: int
    limits: SchedulerLimits
    arrivals: list[Arrival]
    failing: frozenset[int]
    loans: dict[int, int]  # step → how many blocks may be used from then on


def scenario(draw: Draw) -> Scenario:
    """A small world in which something is always short."""
    block_size = (1, 2, 4)[draw.randint(0, 2)]
    num_blocks = draw.randint(6, 24)
    max_num_seqs = draw.randint(1, 5)
    room = num_blocks * block_size
    prefixes = [_tokens(draw, draw.randint(0, room // 2)) for _ in range(draw.randint(1, 3))]
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw.randint(max_num_seqs, 24),
        prefix_cache=_chance(draw, 80),
        expected_tokens=draw.randint(1, 6),
    )
    num_host = draw.randint(1, 2 * num_blocks) if _chance(draw, 75) else 0
    arrivals = [_arrival(draw, room, prefixes) for _ in range(draw.randint(1, 12))]
    failing = frozenset(draw.randint(0, 40) for _ in range(draw.randint(-6, 2)))
    longest = max(len(arrival.prompt) + arrival.max_tokens for arrival in arrivals)
    floor = -(-longest // block_size)  # as an engine keeps at least its window
    loans = {draw.randint(0, 30): draw.randint(floor, num_blocks) for _ in range(draw.randint(-3, 4))}
    return Scenario(num_blocks, block_size, num_host, limits, arrivals, failing, loans)


def _arrival(draw: Draw, room: int, prefixes: list[list[int]]) -> Arrival:
    prefix = prefixes[draw.randint(0, len(prefixes) - 1)]
    prompt = (prefix + _tokens(draw, draw.randint(1, 6)))[: room - 1]
    return Arrival(
        step=draw.randint(0, 12),
        prompt=prompt,
        max_tokens=draw.randint(1, min(room - len(prompt), 40)),
        stop=frozenset(draw.randint(0, 96) for _ in range(draw.randint(0, 3))),
        tenant="abc"[draw.randint(0, 2)],
        priority=(0, 0, 0, 0, -1, 1)[draw.randint(0, 5)],
        abort_at=draw.randint(0, 30) if _chance(draw, 15) else None,
        abort_mid_step=_chance(draw, 50),
        deadline=draw.randint(0, 60) if _chance(draw, 15) else None,
        grammar_length=draw.randint(0, 12) if _chance(draw, 20) else None,
        grammar_ready=draw.randint(0, 30) if _chance(draw, 70) else 0,
        grammar_fails=_chance(draw, 10),
    )


def _tokens(draw: Draw, count: int) -> list[int]:
    return [draw.randint(0, 3) for _ in range(count)]


def _chance(draw: Draw, percent: int) -> bool:
    return draw.randint(1, 100) <= percent


@dataclass
class Wait:
    """What a waiting sequence has seen of other tenants since it came."""

    served: dict[str, int]
    passed: dict[str, list[Sequence]] = field(default_factory=dict)


class World:
    """Plays a scenario. `scheduler` may be replaced before `play`, by one that records or is wrong on purpose."""

    def __init__(self, scenario: Scenario, kind: type[Scheduler] = Scheduler) -> None:
        self.scenario = scenario
        self.pool = BlockPool(scenario.num_blocks, scenario.block_size)
        self.scheduler = kind(self.pool, scenario.limits, HostCache(scenario.num_host))
        self.runner = HashRunner(scenario.num_blocks, scenario.block_size, scenario.num_host)
        self.sequences: dict[int, Sequence] = {}
        self.waits: dict[int, Wait] = {}
        self.steps = 0
        self.passed_most = 0.0
        self._admit = self.scheduler.shares.admit
        self.scheduler.shares.admit = self.admitted  # type: ignore[method-assign]

    def play(self) -> None:
        last = max(arrival.step for arrival in self.scenario.arrivals)
        while self.steps <= last or self.scheduler.has_work:
            self.arrive()
            self.lend()
            self.abort(mid_step=False)
            self.refresh()
            if self.scheduler.can_step:
                self.step()
            self.steps += 1
            assert self.steps < 5000, "the scheduler makes no progress"
        self.judge()

    def arrive(self) -> None:
        for id, arrival in enumerate(self.scenario.arrivals):
            if arrival.step != self.steps:
                continue
            grammar = None
            if arrival.grammar_length is not None:
                grammar = EvenGrammar(arrival.grammar_length, ready=arrival.grammar_ready <= self.steps)
            sequence = Sequence(
                id,
                arrival.prompt,
                SamplingParams(arrival.max_tokens, stop_token_ids=arrival.stop),
                root=hash_root("rev", arrival.tenant),
                priority=arrival.priority,
                tenant=arrival.tenant,
                deadline=None if arrival.deadline is None else float(arrival.deadline),
                grammar=grammar,
            )
            self.sequences[id] = sequence
            self.scheduler.add(sequence)

    def lend(self) -> None:
        if self.steps in self.scenario.loans:
            self.scheduler.limit(self.scenario.loans[self.steps])
            self.scheduler.check()
        self.runner.give_back(self.pool.newly_withheld())

    def refresh(self) -> None:
        for id, sequence in self.sequences.items():
            arrival, grammar = self.scenario.arrivals[id], sequence.grammar
            if isinstance(grammar, EvenGrammar) and not grammar.ready and arrival.grammar_ready <= self.steps:
                grammar.error = "no such schema" if arrival.grammar_fails else None
                grammar.ready = True
        for sequence in self.scheduler.refresh(float(self.steps)):
            assert sequence.finish_reason in (FinishReason.DEADLINE, FinishReason.ERROR)
        for id, sequence in self.sequences.items():
            deadline = self.scenario.arrivals[id].deadline
            assert sequence.finish_reason or deadline is None or deadline > self.steps, "a deadline was missed"
        self.scheduler.check()
        for sequence in self.scheduler.waiting:
            shares = self.scheduler.shares
            self.waits.setdefault(sequence.id, Wait({tenant: shares.served(tenant) for tenant in "abc"}))

    def abort(self, *, mid_step: bool) -> None:
        for id, arrival in enumerate(self.scenario.arrivals):
            if arrival.abort_at == self.steps and arrival.abort_mid_step == mid_step:
                before = id in self.sequences and self.sequences[id].num_output
                self.scheduler.abort([id, 999])
                self.scheduler.check()
                if id in self.sequences:
                    assert self.sequences[id].block_table == []
                    assert self.sequences[id].num_output == before

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.look_at(step)
        if self.steps in self.scenario.failing:
            self.scheduler.fail(step)
            self.scheduler.check()
            return
        computed = self.runner.forward(step)
        masks = masks_of(step)
        self.abort(mid_step=True)
        finished = {s.id: s.num_output for s in self.sequences.values() if s.finish_reason}
        self.scheduler.complete(step, self.runner.sample(step, computed, masks))
        for id, outputs in finished.items():
            assert self.sequences[id].num_output == outputs, "a token came after the end"
        self.scheduler.check()
        assert not self.scheduler.host._pinned, "a slot stays pinned after its step"
        if step.copies_out:
            self.compare_host()

    def look_at(self, step: Step) -> None:
        """What holds of every plan."""
        limits = self.scenario.limits
        assert step.num_tokens > 0, "a step with work must not be empty"
        assert step.num_tokens <= limits.max_num_batched_tokens
        assert len(self.scheduler.running) <= limits.max_num_seqs
        assert len({chunk.sequence.id for chunk in step.chunks}) == len(step.chunks)
        ready = [s for s in self.scheduler.running if s.remaining == 1]
        assert {s.id for s in ready} <= {c.sequence.id for c in step.chunks}, "a decode was left out"
        for victim in step.preempted:
            assert all(chunk.sequence is not victim for chunk in step.chunks)
        assert not (step.preempted and step.admitted), "a step that preempted admitted somebody"

    def compare_host(self) -> None:
        """Every block on the host holds the tokens that its hash stands for."""
        size = self.scenario.block_size
        known = {
            digest: sequence.tokens[at * size : (at + 1) * size]
            for sequence in self.sequences.values()
            for at, digest in enumerate(sequence.block_hashes(size))
        }
        for digest, slot in self.scheduler.host._slots.items():
            assert self.runner.host[slot] == known[digest], "the host holds something else"

    def admitted(self, sequence: Sequence) -> None:
        """The bound of engine/fairness.py, for everybody who still waits, from tokens counted here."""
        served = self.scheduler.shares.served
        tenant, expected = sequence.tenant, self.scenario.limits.expected_tokens
        self.waits.pop(sequence.id, None)
        longest = max(len(arrival.prompt) for arrival in self.scenario.arrivals) + expected
        holding = sum(s.status in (Status.RUNNING, Status.PREEMPTED) for s in self.sequences.values())
        for other in self.scheduler.waiting:
            if other.tenant == tenant or other.priority != sequence.priority or other.status is not Status.WAITING:
                continue
            assert served(tenant) <= served(other.tenant), "the better served went first"
            wait = self.waits.get(other.id)
            if wait is None:
                continue
            passed = wait.passed.setdefault(tenant, [])
            passed.append(sequence)
            work = sum(s.num_prompt - s.num_cached + s.num_output for s in passed)
            bound = served(other.tenant) - wait.served[tenant] + longest + expected * holding
            assert work <= bound, f"{other!r} was passed by {work} tokens, the bound is {bound}"
            self.passed_most = max(self.passed_most, work / bound)
        self._admit(sequence)

    def judge(self) -> None:
        """Everybody got what the oracle says, and everything came back."""
        for id, arrival in enumerate(self.scenario.arrivals):
            sequence = self.sequences[id]
            grammar = None if arrival.grammar_length is None else EvenGrammar(arrival.grammar_length)
            expected = oracle(arrival.prompt, arrival.max_tokens, arrival.stop, grammar)
            got = sequence.tokens[sequence.num_prompt :]
            assert sequence.status is Status.FINISHED
            if sequence.finish_reason in ENDED_EARLY:
                expected = expected[: len(got)]
            assert got == expected, f"{sequence!r} did not get its oracle's tokens"
        self.pool.limit(self.scenario.num_blocks)
        assert self.pool.num_free == self.scenario.num_blocks, "a block is lost"
        self.compare_host()
        counts = self.scheduler.counts
        assert counts.generation_tokens == sum(s.num_output for s in self.sequences.values())
        assert sum(counts.finished.values()) == len(self.scenario.arrivals)
        assert counts.preemptions.total() == sum(s.preemptions for s in self.sequences.values())
        assert len(self.scheduler.waiting) == self.scheduler.waiting.num_tokens == 0


def tally(world: World) -> Counter[str]:
    """What happened in a played world, to see that schedules exercise what they should."""
    counts, arrivals = world.scheduler.counts, world.scenario.arrivals
    return Counter(
        requests=len(arrivals),
        loans=len(world.scenario.loans),
        steps=counts.steps,
        tokens=counts.generation_tokens,
        preempted_swap=counts.preemptions["swap"],
        preempted_recompute=counts.preemptions["recompute"],
        swapped_out_blocks=counts.swapped_out_blocks,
        swapped_in_blocks=counts.swapped_in_blocks,
        host_evictions=world.scheduler.host.evictions,
        prefix_hit_tokens=counts.prefix_hit_tokens,
        with_grammar=sum(a.grammar_length is not None for a in arrivals),
        **{f"ended_{reason}": count for reason, count in counts.finished.items()},
    )


def seeded(seed: int) -> Scenario:
    """The scenario of a number."""
    return scenario(Random(seed))
