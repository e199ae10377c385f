"""The step loop: one thread that schedules, computes, commits and delivers.

Everyone else talks to it through a mailbox, which is drained before a step is planned and again
before it is committed. So an abort frees its blocks in the same step, and no token follows it.

A step's deltas are handed over while the device works on the next step, or at once when there is none.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.errors import RequestError
from engine.grammar import NO_MASKS, Masks
from engine.outbox import Choice, Delta
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.steps import Parts, StepLog, StepRecord
from engine.types import FinishReason, Sampled, Step

HUNG_FLOOR_S = 10.0
HUNG_FACTOR = 5.0
STEP_FAULTS = (RuntimeError, IndexError, ValueError)
"""How torch and numpy report memory, kernels, indices and shapes: the step's sequences end, the others go on."""


@dataclass(frozen=True, slots=True)
class Add:
    """Mailbox: start a choice."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Abort:
    """Mailbox: end sequences, if they still run; None means all."""

    ids: tuple[int, ...] | None
    reason: FinishReason = FinishReason.ABORT
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """Mailbox: give out the first so many KV blocks only, and the memory of the others back."""

    usable_blocks: int


Message = Add | Abort | Limit
Deliveries = list[tuple[Choice, Delta]]


class Observer(Protocol):
    """Sees steps, tokens and ends as they happen, on the step thread; metrics implement it."""

    def on_step(self, record: StepRecord) -> None:
        """A step was committed."""
        ...

    def on_token(self, sequence: Sequence) -> None:
        """A sequence got a token."""
        ...

    def on_finish(self, sequence: Sequence) -> None:
        """A sequence ended."""
        ...


class Pace:
    """Learns how long a step takes, to tell slow from hung."""

    FIXED = 32
    """Tokens' worth of time a step costs before its first token."""

    def __init__(self) -> None:
        self._per_token = 0.0
        self.recent: deque[float] = deque(maxlen=512)

    def record(self, tokens: int, seconds: float) -> None:
        """Take one step into account (moving average over about 20 steps)."""
        self.recent.append(seconds)
        rate = seconds / (tokens + self.FIXED)
        self._per_token += (rate - self._per_token) * (0.05 if self._per_token else 1.0)

    def expected(self, tokens: int) -> float:
        """Seconds a step of that many tokens should take."""
        return self._per_token * (tokens + self.FIXED)


class EngineCore:
    """Owns the scheduler and the runner; `deliver` gets each step's deltas in one call."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        deliver: Callable[[Deliveries], None],
        observer: Observer,
        vocab_size: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.steps = StepLog()
        self.pace = Pace()
        self.fault: str | None = None
        self.started_at = time.monotonic()
        self.last_step_at = self.started_at
        self._runner = runner
        # A runner may say that its forward returns before the device is done, and what its last step spent time on.
        self._returns_early = bool(getattr(runner, "returns_early", False))
        self._runner_parts: Callable[[], Mapping[str, float]] = getattr(runner, "parts", dict)
        self._give_back: Callable[[list[tuple[int, int]]], None] = getattr(runner, "give_back", lambda runs: None)
        self._mask_words = -(-vocab_size // 32)
        self._deliver = deliver
        self._observer = observer
        self._mailbox: deque[Message] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._busy_since: float | None = None
        self._step_tokens = 0
        self._choices: dict[int, Choice] = {}
        self._out: Deliveries = []
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)

    def start(self) -> None:
        """Start the step thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; sequences that still run end as errors."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    def post(self, message: Message) -> None:
        """Hand a message to the step thread; any thread may call this."""
        self._mailbox.append(message)
        self._wake.set()

    def wake(self) -> None:
        """Have the step thread look again: a grammar was compiled. Any thread may call this."""
        self._wake.set()

    def abort_all(self, error: str) -> None:
        """End everything with an error that clients can read."""
        self.post(Abort(None, FinishReason.ERROR, error))

    @property
    def num_running(self) -> int:
        """Sequences holding blocks."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences queued, those still in the mailbox or waiting for a grammar included."""
        return len(self.scheduler.waiting) + len(self.scheduler.compiling) + len(self._mailbox)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt and output tokens of those sequences."""
        posted = [m.choice.sequence for m in tuple(self._mailbox) if isinstance(m, Add)]
        apart = sum([sequence.num_tokens for sequence in (*posted, *tuple(self.scheduler.compiling))])
        return self.scheduler.waiting.num_tokens + apart

    def timing(self) -> dict[str, float]:
        """Ages in seconds, and how long recent steps took in milliseconds."""
        now, recent = time.monotonic(), sorted(self.pace.recent)
        return {
            "uptime_s": round(now - self.started_at, 3),
            "last_step_age_s": round(now - self.last_step_at, 3),
            "step_ms_p50": round(recent[len(recent) // 2] * 1000, 3) if recent else 0.0,
            "step_ms_p99": round(recent[len(recent) * 99 // 100] * 1000, 3) if recent else 0.0,
        }

    def unhealthy(self) -> str | None:
        """Why the engine makes no progress, or None. Slow is not hung."""
        if self.fault is not None:
            return self.fault
        if not self._thread.is_alive():
            return "the step thread is not running"
        busy_since = self._busy_since
        if busy_since is None and not self._mailbox:
            return None
        limit = max(HUNG_FLOOR_S, HUNG_FACTOR * self.pace.expected(self._step_tokens))
        age = time.monotonic() - max(self.last_step_at, busy_since or self.last_step_at)
        if busy_since is not None and age > limit:
            return f"no step for {age:.0f} s while {self.num_running} sequences run"
        return None

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._drain()
                if self.scheduler.can_step:
                    self._busy_since = self._busy_since or time.monotonic()
                    self._step()
                else:
                    self._idle()
        finally:
            error = sys.exc_info()[1]
            if error is not None:
                self.fault = f"the step thread died: {type(error).__name__}: {error}"
            self._fail_all(self.fault or "the engine is shutting down")

    def _idle(self) -> None:
        if self._busy_since is not None:
            self._busy_since = None
            self.scheduler.check()
        self._flush()
        deadline = self.scheduler.next_deadline
        self._wake.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _step(self) -> None:
        parts = Parts()
        step = self.scheduler.schedule()
        self._step_tokens = step.num_tokens
        parts.mark("schedule")
        try:
            sampled = self._compute(step, parts)
        except STEP_FAULTS as error:
            self._fail_step(step, f"{type(error).__name__}: {error}")
            return
        self._drain()
        for sequence in self.scheduler.complete(step, sampled, self._on_token):
            self._close(sequence, Delta(finish=FinishReason.STOP))
        parts.mark("commit")
        self.last_step_at = parts.last
        self.pace.record(step.num_tokens, parts.total)
        record = StepRecord.of(step, parts, self._runner_parts(), len(self.scheduler.running), self.num_waiting)
        self.steps.append(record)
        self._observer.on_step(record)

    def _compute(self, step: Step, parts: Parts) -> dict[int, Sampled]:
        """Run the step, and beside it deliver what the one before gave.

        Where forward blocks, the deltas go out before it: the event loop then sends them while the device computes.
        """
        if not self._returns_early:
            self._flush()
            parts.mark("deliver")
        computed = self._runner.forward(step)
        parts.mark("forward")
        if self._returns_early:
            self._flush()
            parts.mark("deliver")
        masks = self._masks(step)
        parts.mark("mask")
        sampled = self._runner.sample(step, computed, masks)
        parts.mark("sample")
        return sampled

    def _masks(self, step: Step) -> Masks:
        """What the grammars of the sampling sequences allow next. One that cannot tell ends its own sequence only."""
        constrained = [(s, s.grammar) for s in (c.sequence for c in step.chunks if c.samples) if s.grammar is not None]
        if not constrained:
            return NO_MASKS
        rows = np.full((len(constrained), self._mask_words), -1, np.int32)
        masks = {}
        for (sequence, grammar), row in zip(constrained, rows, strict=True):
            try:
                grammar.fill(row)
            except STEP_FAULTS as error:
                self._abort(Abort((sequence.id,), FinishReason.ERROR, str(error)))
            masks[sequence.id] = row
        return masks

    def _drain(self) -> None:
        while self._mailbox:
            message = self._mailbox.popleft()
            match message:
                case Add():
                    self._add(message.choice)
                case Abort():
                    self._abort(message)
                case Limit():
                    self.scheduler.limit(message.usable_blocks)
        for sequence in self.scheduler.refresh(time.monotonic()):
            self._close(sequence, Delta(finish=sequence.finish_reason, error=_why(sequence)))
        withheld = self.scheduler.pool.newly_withheld()
        if withheld:  # between two steps: the device reads none of these blocks
            self._give_back(withheld)

    def _add(self, choice: Choice) -> None:
        self._choices[choice.sequence.id] = choice
        try:
            self.scheduler.add(choice.sequence)
        except RequestError as error:
            self._close(choice.sequence, Delta(finish=FinishReason.ERROR, error=error.message))

    def _abort(self, message: Abort) -> None:
        ids = tuple(self._choices) if message.ids is None else message.ids
        for sequence in self.scheduler.abort(ids, message.reason):
            self._close(sequence, Delta(finish=message.reason, error=message.error))

    def _on_token(self, sequence: Sequence, sampled: Sampled, reason: FinishReason | None) -> bool:
        choice = self._choices[sequence.id]
        delta = choice.accept(sampled, reason)
        self._observer.on_token(sequence)
        if delta.finish is None:
            self._out.append((choice, delta))
            return False
        sequence.finish_reason = delta.finish
        self._close(sequence, delta)
        return delta.finish is FinishReason.STOP

    def _close(self, sequence: Sequence, delta: Delta) -> None:
        self._out.append((self._choices.pop(sequence.id), delta))

    def _flush(self) -> None:
        """Hand over the step's deltas; ends are observed here, after their status is final."""
        out, self._out = self._out, []
        if not out:
            return
        for choice, delta in out:
            if delta.finish is not None:
                self._observer.on_finish(choice.sequence)
        self._deliver(out)

    def _fail_step(self, step: Step, error: str) -> None:
        for sequence in self.scheduler.fail(step):
            self._close(sequence, Delta(finish=FinishReason.ERROR, error=error))
        self.last_step_at = time.monotonic()
        self._flush()

    def _fail_all(self, error: str) -> None:
        self._drain()
        self._abort(Abort(None, FinishReason.ERROR, error))
        self._flush()


def _why(sequence: Sequence) -> str | None:
    """What a client is told of a sequence that ended by itself, without a token."""
    if sequence.finish_reason is FinishReason.DEADLINE:
        return "The deadline of this request passed before its answer was complete."
    return sequence.grammar.error if sequence.grammar is not None else None
