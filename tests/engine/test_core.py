"""The step loop with a fake runner: mailbox, aborts, faults, health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine import core as module
from engine.blockmap import block_map
from engine.blocks import BlockPool
from engine.core import Abort, Add, Deliveries, EngineCore, Limit, Pace
from engine.grammar import NO_MASKS, Masks
from engine.hostcache import HostCache
from engine.outbox import Choice, Delta, Outbox
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.steps import KEPT, Parts, StepLog, StepRecord
from engine.tokenizer import Detokenizer
from engine.types import FinishReason, Sampled, SamplingParams, Step
from tests.engine.fakes import VOCAB, EvenGrammar, HashRunner, oracle

TABLE = [bytes([65 + id % 26]) for id in range(97)]


class Silent:
    """An observer that records steps and ends."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_token(self, sequence: Sequence) -> None: ...

    def on_finish(self, sequence: Sequence) -> None:
        self.ended.append(sequence.id)


class Hooked(HashRunner):
    """A hash runner that calls back in the middle of each forward pass."""

    hook: Callable[[Step], None] = staticmethod(lambda step: None)

    def forward(self, step: Step) -> object:
        computed = super().forward(step)
        self.hook(step)
        return computed


class Rig:
    """A running core whose deliveries land in a list."""

    def __init__(
        self,
        runner: Hooked | None = None,
        log: list[str] | None = None,
        vocab_size: int = 0,
        num_host: int = 0,
        **limits: int,
    ) -> None:
        self.pool = BlockPool(32, 4)
        self.runner = runner or Hooked(32, 4, num_host)
        self.log = [] if log is None else log
        self.scheduler = Scheduler(self.pool, SchedulerLimits(**limits), HostCache(num_host))
        self.observer = Silent()
        self.deltas: dict[int, list[Delta]] = {}
        self.finished = threading.Condition()
        self.core = EngineCore(self.scheduler, self.runner, self.receive, self.observer, vocab_size)

    def receive(self, deliveries: Deliveries) -> None:
        self.log.append("deliver")
        with self.finished:
            for choice, delta in deliveries:
                self.deltas.setdefault(choice.sequence.id, []).append(delta)
            self.finished.notify_all()

    def choice(self, id: int, prompt: list[int], **settings: Any) -> Choice:
        own = {name: settings.pop(name) for name in ("grammar", "deadline", "tenant") if name in settings}
        sequence = Sequence(id, prompt, SamplingParams(**{"max_tokens": 6, **settings}), **own)
        choice = Choice.__new__(Choice)
        outbox = Outbox.__new__(Outbox)
        Choice.__init__(choice, 0, sequence, Detokenizer(TABLE), outbox)
        return choice

    def wait(self, id: int) -> Delta:
        """The last delta of a sequence, once it has ended."""

        def ended() -> bool:
            return bool(self.deltas.get(id)) and self.deltas[id][-1].finish is not None

        with self.finished:
            assert self.finished.wait_for(ended, timeout=30)
        return self.deltas[id][-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    if made.core._thread.is_alive():
        made.core.stop()


def test_tokens_arrive_as_text_and_end_with_a_reason(rig: Rig) -> None:
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3])))
    assert rig.wait(1).finish is FinishReason.LENGTH
    expected = "".join(TABLE[id].decode() for id in oracle([1, 2, 3], 6))
    assert "".join(delta.text for delta in rig.deltas[1]) == expected
    assert sum(delta.tokens for delta in rig.deltas[1]) == 6


def test_a_stop_string_ends_in_the_step_that_completes_it(rig: Rig) -> None:
    tokens = oracle([1, 2, 3], 20)
    full = "".join(TABLE[id].decode() for id in tokens)
    stop = full[3:5]
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3], max_tokens=20, stop=(stop,))))
    assert rig.wait(1).finish is FinishReason.STOP
    at = full.find(stop)
    assert "".join(delta.text for delta in rig.deltas[1]) == full[:at]
    generated = sum(delta.tokens for delta in rig.deltas[1])
    assert generated == at + 2 == rig.scheduler.counts.generation_tokens
    assert rig.scheduler.counts.finished == {"stop": 1}


def test_an_abort_in_mid_step_is_final(rig: Rig) -> None:
    """Posted during the third forward pass: that pass's token is dropped, the blocks are free."""
    calls: list[int] = []

    def hook(step: Step) -> None:
        calls.append(step.index)
        if len(calls) == 3:
            rig.core.post(Abort((1,)))

    rig.runner.hook = hook  # type: ignore[method-assign]
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3], max_tokens=50)))
    assert rig.wait(1).finish is FinishReason.ABORT
    assert sum(delta.tokens for delta in rig.deltas[1]) == 2
    assert len(calls) == 3
    assert rig.pool.num_free == 32


@pytest.mark.parametrize("kind", [RuntimeError, IndexError, ValueError])
def test_a_failed_step_ends_its_sequences_and_the_engine_goes_on(rig: Rig, kind: type[Exception]) -> None:
    def hook(step: Step) -> None:
        if any(chunk.sequence.id == 1 for chunk in step.chunks):
            raise kind("out of memory")

    rig.runner.hook = hook  # type: ignore[method-assign]
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3])))
    last = rig.wait(1)
    assert (last.finish, last.error) == (FinishReason.ERROR, f"{kind.__name__}: out of memory")
    rig.core.post(Add(rig.choice(2, [1, 2, 3])))
    assert rig.wait(2).finish is FinishReason.LENGTH
    assert rig.core.unhealthy() is None
    assert rig.pool.num_free == 32


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_kills_the_thread_and_health_says_so(rig: Rig) -> None:
    def hook(step: Step) -> None:
        raise ZeroDivisionError("a bug")

    rig.runner.hook = hook  # type: ignore[method-assign]
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3])))
    assert rig.wait(1).finish is FinishReason.ERROR
    assert rig.core.unhealthy() == "the step thread died: ZeroDivisionError: a bug"


def test_stopping_ends_what_runs_with_an_error(rig: Rig) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hook(step: Step) -> None:
        entered.set()
        leave.wait(30)

    rig.runner.hook = hook  # type: ignore[method-assign]
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3], max_tokens=60)))
    assert entered.wait(30)
    rig.core._stopping = True
    leave.set()
    assert rig.wait(1).error == "the engine is shutting down"


def test_hung_is_told_from_slow(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in progress is fine until max(10 s, 5 × what its tokens should take)."""
    entered, leave = threading.Event(), threading.Event()

    def hook(step: Step) -> None:
        entered.set()
        leave.wait(30)

    rig.runner.hook = hook  # type: ignore[method-assign]
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3])))
    assert entered.wait(30)
    real = module.time.monotonic
    shift = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + shift)
    shift = 8.0
    assert rig.core.unhealthy() is None
    shift = 11.0
    assert "no step for" in str(rig.core.unhealthy())
    for _ in range(200):
        rig.core.pace.record(3, 10.0)
    assert rig.core.unhealthy() is None
    shift = 60.0
    assert rig.core.unhealthy() is not None
    monkeypatch.undo()
    leave.set()
    rig.wait(1)


def test_idle_for_a_day_is_healthy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3])))
    rig.wait(1)
    real = module.time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + 86400)
    assert rig.core.unhealthy() is None


def test_pace_learns_from_steps() -> None:
    pace = Pace()
    assert pace.expected(512) == 0.0
    for _ in range(50):
        pace.record(32, 0.064)
    assert pace.expected(96) == pytest.approx(0.128)


async def test_a_slow_reader_gets_one_merged_delta() -> None:
    """However much is delivered between two reads, one delta per choice waits."""
    outbox = Outbox()
    outbox.open = 1
    for letter in "abc":
        outbox.deliver(0, Delta(letter, 1, [Sampled(1)]))
    outbox.deliver(0, Delta("d", 1, finish=FinishReason.STOP))
    ready = await outbox.take()
    assert len(ready) == 1
    assert (ready[0][1].text, ready[0][1].tokens) == ("abcd", 4)
    assert ready[0][1].finish is FinishReason.STOP


async def test_tokens_nobody_was_told_of_are_counted_apart() -> None:
    """generated = reported + undelivered, once the reader has left and all has ended."""
    undelivered: list[int] = []
    outbox = Outbox(undelivered.append)
    outbox.open = 1
    outbox.deliver(0, Delta("a", 3))
    outbox.reported = 3
    outbox.deliver(0, Delta("b", 2))
    outbox.leave()
    assert undelivered == []
    outbox.deliver(0, Delta(finish=FinishReason.ABORT))
    assert undelivered == [2]


class Ordered(Hooked):
    """Writes down when its parts run, in one list with the deliveries."""

    def __init__(self, log: list[str], *, returns_early: bool) -> None:
        super().__init__(32, 4)
        self.returns_early = returns_early
        self.log = log

    def parts(self) -> dict[str, float]:
        return {"linears": 1.25}

    def forward(self, step: Step) -> object:
        self.log.append("forward")
        return super().forward(step)

    def sample(self, step: Step, computed: object, masks: Masks = NO_MASKS) -> dict[int, Sampled]:
        self.log.append("sample")
        return super().sample(step, computed, masks)


@pytest.mark.parametrize("returns_early", [False, True])
def test_deltas_go_out_beside_the_next_step_and_the_last_at_once(*, returns_early: bool) -> None:
    """Before a forward that blocks, after one that comes back; never after waiting for the device."""
    log: list[str] = []
    rig = Rig(runner=Ordered(log, returns_early=returns_early), log=log)
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3], max_tokens=3)))
    rig.wait(1)
    rig.core.stop()
    between = ["forward", "deliver"] if returns_early else ["deliver", "forward"]
    assert log == ["forward", "sample", *between, "sample", *between, "sample", "deliver"]


def test_each_step_leaves_a_record_with_its_parts() -> None:
    rig = Rig(runner=Ordered([], returns_early=True), max_num_batched_tokens=8, max_num_seqs=8)
    rig.core.start()
    rig.core.post(Add(rig.choice(1, list(range(12)), max_tokens=3)))
    rig.wait(1)
    rig.core.stop()
    records = rig.core.steps.last(10)
    assert rig.observer.records == records
    assert [(r.decode_tokens, r.prefill_tokens, r.admitted) for r in records] == [
        (0, 8, 1),
        (0, 4, 0),
        (1, 0, 0),
        (1, 0, 0),
    ]
    assert [r.step for r in rig.core.steps.last(2)] == [3, 4]
    shown = records[-1].as_dict()
    assert shown["runner"] == {"linears": 1.25}
    assert shown["parts"].keys() == {"schedule", "forward", "deliver", "mask", "sample", "commit"}
    assert sum(records[0].parts.values()) == pytest.approx(records[0].seconds)
    assert rig.core.steps.seconds["commit"] == pytest.approx(sum(r.parts["commit"] for r in records))


def test_the_log_of_steps_is_bounded() -> None:
    log = StepLog()
    for index in range(KEPT + 50):
        log.append(StepRecord.of(Step(index), Parts(), {}, 0, 0))
    assert [len(log.last(10**9)), log.last(10**9)[0].step, log.last(0)] == [KEPT, 50, []]


def test_a_grammar_is_asked_for_masks_and_told_of_tokens() -> None:
    rig = Rig(vocab_size=VOCAB)
    grammar = EvenGrammar(3, ready=False)
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3], grammar=grammar)))
    rig.core.post(Add(rig.choice(2, [1, 2, 3])))
    assert rig.wait(2).finish is FinishReason.LENGTH
    assert 1 not in rig.deltas
    grammar.ready = True
    rig.core.wake()
    assert rig.wait(1).finish is FinishReason.STOP, "a complete text was not the end"
    assert grammar.accepted == oracle([1, 2, 3], 3, grammar=EvenGrammar(3))


def test_a_grammar_that_fails_ends_its_own_sequence_with_its_reason() -> None:
    class Broken(EvenGrammar):
        def fill(self, mask: npt.NDArray[np.int32]) -> None:
            raise ValueError("it costs too much")

    rig = Rig(vocab_size=VOCAB)
    late = EvenGrammar(3, ready=False)
    rig.core.start()
    rig.core.post(Add(rig.choice(1, [1, 2, 3], grammar=Broken(3))))
    rig.core.post(Add(rig.choice(2, [1, 2, 3], grammar=late)))
    rig.core.post(Add(rig.choice(3, [1, 2, 3])))
    late.error, late.ready = "no such keyword", True
    rig.core.wake()
    assert (rig.wait(1).finish, rig.wait(1).error) == (FinishReason.ERROR, "it costs too much")
    assert (rig.wait(2).finish, rig.wait(2).error) == (FinishReason.ERROR, "no such keyword")
    assert rig.wait(3).finish is FinishReason.LENGTH


def test_a_deadline_ends_a_sequence_that_waits_for_nothing_but_its_grammar() -> None:
    """Nothing runs and nobody posts: the step thread wakes by itself."""
    rig = Rig(vocab_size=VOCAB)
    rig.core.start()
    grammar = EvenGrammar(3, ready=False)
    rig.core.post(Add(rig.choice(1, [1, 2, 3], grammar=grammar, deadline=time.monotonic() + 0.05)))
    last = rig.wait(1)
    assert (last.finish, last.error) == (
        FinishReason.DEADLINE,
        "The deadline of this request passed before its answer was complete.",
    )
    assert rig.core.unhealthy() is None


def test_a_deadline_ends_a_sequence_in_mid_answer() -> None:
    rig = Rig()
    calls: list[int] = []

    def hook(step: Step) -> None:
        calls.append(step.index)
        if len(calls) == 3:
            first.deadline = None
            rig.scheduler._deadlines[0] = (0.0, 1)

    rig.runner.hook = hook  # type: ignore[method-assign]
    choice = rig.choice(1, [1, 2, 3], max_tokens=60, deadline=time.monotonic() + 3600)
    first = choice.sequence
    rig.core.start()
    rig.core.post(Add(choice))
    assert rig.wait(1).finish is FinishReason.DEADLINE
    assert sum(delta.tokens for delta in rig.deltas[1]) == 2
    assert rig.pool.num_free == 32


def test_waiting_tokens_are_counted_wherever_they_wait() -> None:
    rig = Rig()
    rig.core.post(Add(rig.choice(1, [1, 2, 3])))
    assert (rig.core.num_waiting, rig.core.num_waiting_tokens) == (1, 3)
    rig.core._drain()
    assert (rig.core.num_waiting, rig.core.num_waiting_tokens) == (1, 3)
    rig.core.post(Add(rig.choice(2, [1, 2], grammar=EvenGrammar(1, ready=False))))
    rig.core._drain()
    assert (rig.core.num_waiting, rig.core.num_waiting_tokens) == (2, 5)


def test_looking_from_another_thread_disturbs_nobody() -> None:
    """Everything /stats and /debug read, as fast as possible, while sequences of many tenants come, swap and go."""
    rig = Rig(num_host=16, max_num_seqs=8)
    core, done = rig.core, threading.Event()
    errors: list[BaseException] = []
    looks: list[int] = []

    def look() -> None:
        try:
            while not done.is_set():
                seen = block_map(core.scheduler)
                assert seen["free"] + seen["cached"] + seen["held"] == 32
                looks.append(len(core.steps.last(50)) + core.num_waiting + core.num_waiting_tokens)
                core.steps.mean_ms()
                core.timing()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    watcher = threading.Thread(target=look)
    core.start()
    watcher.start()
    for id in range(300):
        core.post(Add(rig.choice(id, [id % 50, *range(id % 40)], max_tokens=20, tenant=f"t{id % 37}")))
    for id in range(300):
        rig.wait(id)
    done.set()
    watcher.join(30)
    assert errors == []
    assert len(looks) > 10
    assert rig.scheduler.counts.swapped_in_blocks > 0


def test_a_limit_takes_hold_between_two_steps_and_gives_memory_back() -> None:
    runner, returned, steps = Hooked(32, 4), list[list[tuple[int, int]]](), iter(range(100))
    runner.give_back = returned.append  # type: ignore[method-assign]
    rig = Rig(runner)
    runner.hook = lambda step: rig.core.post(Limit(8)) if next(steps) == 2 else None
    rig.core.start()
    rig.core.post(Add(rig.choice(1, list(range(20)), max_tokens=10)))
    assert rig.wait(1).finish is FinishReason.LENGTH
    assert (returned, rig.pool.usable) == ([[(8, 24)]], 8)
    rig.core.post(Limit(32))
    rig.core.post(Add(rig.choice(2, list(range(20)), max_tokens=60)))
    assert rig.wait(2).finish is FinishReason.LENGTH
    rig.core.stop()
    assert rig.pool.num_free == 32
