"""The pure core under random load: every request gets exactly its oracle's tokens, no block is lost."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence, hash_root
from engine.types import FinishReason, SamplingParams, Status
from tests.engine.fakes import HashRunner, oracle


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario."""

    step: int
    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    salt: str
    priority: int
    abort_at: int | None
    abort_mid_step: bool


@dataclass(frozen=True)
class Scenario:
    """A pool, its limits, and what arrives."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    batched: int
    prefix_cache: bool
    arrivals: list[Arrival]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    block_size = draw(st.sampled_from([1, 2, 4]))
    num_blocks = draw(st.integers(6, 24))
    max_num_seqs = draw(st.integers(1, 5))
    room = num_blocks * block_size
    prefixes = draw(st.lists(st.lists(st.integers(0, 3), max_size=room // 2), max_size=3)) or [[]]
    arrivals = []
    for _ in range(draw(st.integers(1, 9))):
        prefix = draw(st.sampled_from(prefixes))
        tail = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        prompt = (prefix + tail)[: room - 1]
        arrivals.append(
            Arrival(
                step=draw(st.integers(0, 12)),
                prompt=prompt,
                max_tokens=draw(st.integers(1, room - len(prompt))),
                stop=frozenset(draw(st.lists(st.integers(0, 96), max_size=3))),
                salt=draw(st.sampled_from(["a", "b"])),
                priority=draw(st.sampled_from([0, 0, 0, -1, 1])),
                abort_at=draw(st.none() | st.integers(0, 30)),
                abort_mid_step=draw(st.booleans()),
            )
        )
    return Scenario(
        num_blocks,
        block_size,
        max_num_seqs,
        draw(st.integers(max_num_seqs, 24)),
        draw(st.booleans()),
        arrivals,
    )


class World:
    """Plays a scenario, checking the identity after every change."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.pool = BlockPool(scenario.num_blocks, scenario.block_size)
        limits = SchedulerLimits(
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.batched,
            prefix_cache=scenario.prefix_cache,
        )
        self.scheduler = Scheduler(self.pool, limits)
        self.runner = HashRunner(scenario.num_blocks, scenario.block_size)
        self.sequences: dict[int, Sequence] = {}
        self.steps = 0

    def play(self) -> None:
        last = max(arrival.step for arrival in self.scenario.arrivals)
        while self.steps <= last or self.scheduler.has_work:
            self.arrive()
            self.abort(mid_step=False)
            if self.scheduler.has_work:
                self.step()
            self.steps += 1
            assert self.steps < 5000, "the scheduler makes no progress"

    def arrive(self) -> None:
        for id, arrival in enumerate(self.scenario.arrivals):
            if arrival.step == self.steps:
                params = SamplingParams(arrival.max_tokens, stop_token_ids=arrival.stop)
                root = hash_root("rev", arrival.salt)
                sequence = Sequence(id, arrival.prompt, params, root=root, priority=arrival.priority)
                self.sequences[id] = sequence
                self.scheduler.add(sequence)

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
        assert step.num_tokens > 0, "a step with work must not be empty"
        assert step.num_tokens <= self.scenario.batched
        assert len(self.scheduler.running) <= self.scenario.max_num_seqs
        assert len({chunk.sequence.id for chunk in step.chunks}) == len(step.chunks)
        for victim in step.preempted:
            assert all(chunk.sequence is not victim for chunk in step.chunks)
        computed = self.runner.forward(step)
        self.abort(mid_step=True)
        finished = {s.id: s.num_output for s in self.sequences.values() if s.finish_reason}
        self.scheduler.complete(step, self.runner.sample(step, computed))
        for id, outputs in finished.items():
            assert self.sequences[id].num_output == outputs, "a token came after the end"
        self.scheduler.check()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_every_request_gets_its_oracle_tokens_and_every_block_comes_back(
    scenario: Scenario,
) -> None:
    """Under arrivals, aborts, preemption and shared prefixes the output depends on the request only."""
    world = World(scenario)
    world.play()
    for id, arrival in enumerate(scenario.arrivals):
        sequence = world.sequences[id]
        expected = oracle(arrival.prompt, arrival.max_tokens, arrival.stop)
        got = sequence.tokens[sequence.num_prompt :]
        assert sequence.status is Status.FINISHED
        if sequence.finish_reason is FinishReason.ABORT:
            assert got == expected[: len(got)]
        else:
            assert got == expected
    assert world.pool.num_free == scenario.num_blocks
    counts = world.scheduler.counts
    assert counts.generation_tokens == sum(s.num_output for s in world.sequences.values())
    assert sum(counts.finished.values()) == len(scenario.arrivals)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.booleans(),
)
def test_a_prefix_is_shared_under_one_salt_only(prefix: list[int], tail: list[int], same: bool) -> None:
    """The second request hits the first one's full blocks, capped at num_tokens − 1, or nothing."""
    pool = BlockPool(64, 4)
    scheduler = Scheduler(pool, SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16))
    runner = HashRunner(64, 4)
    first = Sequence(0, prefix, SamplingParams(1), root=hash_root("r", "a"))
    second = Sequence(1, prefix + tail, SamplingParams(1), root=hash_root("r", "a" if same else "b"))
    for sequence in (first, second):
        scheduler.add(sequence)
        while scheduler.has_work:
            step = scheduler.schedule()
            scheduler.complete(step, runner.sample(step, runner.forward(step)))
    full = len(prefix) // 4 * 4
    cap = (len(prefix + tail) - 1) // 4 * 4
    assert second.num_cached == (min(full, cap) if same else 0)
    assert second.tokens[second.num_prompt :] == oracle(prefix + tail, 1)
