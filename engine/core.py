"""The step loop: one thread that schedules, computes, commits and delivers.

Everyone else talks to it through a mailbox, which is drained before a step is planned and again
before it is committed. So an abort frees its blocks in the same step, and no token follows it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.errors import RequestError
from engine.outbox import Choice, Delta
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import FinishReason, Sampled, Step

HUNG_FLOOR_S = 10.0
HUNG_FACTOR = 5.0


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


Message = Add | Abort
Deliveries = list[tuple[Choice, Delta]]


class Observer(Protocol):
    """Sees steps, tokens and ends as they happen, on the step thread; metrics implement it."""

    def on_step(self, step: Step, seconds: float) -> None:
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
    ) -> None:
        self.scheduler = scheduler
        self.pace = Pace()
        self.fault: str | None = None
        self.started_at = time.monotonic()
        self.last_step_at = self.started_at
        self._runner = runner
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

    def abort_all(self, error: str) -> None:
        """End everything with an error that clients can read."""
        self.post(Abort(None, FinishReason.ERROR, error))

    @property
    def num_running(self) -> int:
        """Sequences holding blocks."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences queued, those still in the mailbox included."""
        return len(self.scheduler.waiting) + len(self._mailbox)

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
                if self.scheduler.has_work:
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
        self._wake.wait()

    def _step(self) -> None:
        began = time.monotonic()
        step = self.scheduler.schedule()
        self._step_tokens = step.num_tokens
        try:
            computed = self._runner.forward(step)
            sampled = self._runner.sample(step, computed)
        except (RuntimeError, IndexError, ValueError) as error:
            # torch and numpy report memory, kernels, indices and shapes this way; others can go on.
            self._fail_step(step, f"{type(error).__name__}: {error}")
            return
        self._drain()
        self.scheduler.complete(step, sampled, self._on_token)
        self.last_step_at = time.monotonic()
        self._flush()
        self.pace.record(step.num_tokens, self.last_step_at - began)
        self._observer.on_step(step, self.last_step_at - began)

    def _drain(self) -> None:
        while self._mailbox:
            message = self._mailbox.popleft()
            if isinstance(message, Add):
                self._add(message.choice)
            else:
                self._abort(message)

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
        ids = tuple(chunk.sequence.id for chunk in step.chunks)
        self._abort(Abort(ids, FinishReason.ERROR, error))
        self.last_step_at = time.monotonic()
        self._flush()

    def _fail_all(self, error: str) -> None:
        self._drain()
        self._abort(Abort(None, FinishReason.ERROR, error))
        self._flush()
