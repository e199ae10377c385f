"""Deliberate delays, for tests that ask whether a waterfall or a watchdog tells the truth."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping

from engine.grammar import NO_MASKS, Masks
from engine.runner import Runner
from engine.types import Chunk, Sampled, Step


class FaultyRunner:
    """Wraps a runner and sleeps once per request in `prefill` or `decode`, or in each further `chunk` of a prompt.

    Or it stops for good some time after the first step (`hang`) or after SIGUSR2 (`deadlock`).

    Delays are in milliseconds by phase. They stall the whole step, batch mates included. As its forward may block, it
    never says that it returns early: the step before is then delivered first.
    """

    def __init__(self, inner: Runner, delays: Mapping[str, float]) -> None:
        self._inner = inner
        self._delays = delays
        self._first_step_at: float | None = None
        self._stuck = threading.Event()  # never set
        self._asked_at: float | None = None
        if "deadlock" in delays:
            signal.signal(signal.SIGUSR2, self._on_asked)
        self.parts: Callable[[], Mapping[str, float]] = getattr(inner, "parts", dict)
        self.give_back: Callable[[list[tuple[int, int]]], None] = getattr(inner, "give_back", lambda runs: None)

    def forward(self, step: Step) -> object:
        """See Runner."""
        for chunk in step.chunks:
            self._sleep("prefill", _starts_prefill(chunk))
            self._sleep("chunk", chunk.sequence.num_output == 0 and not _starts_prefill(chunk))
            self._sleep("decode", chunk.sequence.num_output == 1 and chunk.count == 1)
        self._maybe_hang()
        return self._inner.forward(step)

    def sample(self, step: Step, computed: object, masks: Masks = NO_MASKS) -> dict[int, Sampled]:
        """See Runner."""
        return self._inner.sample(step, computed, masks)

    def _sleep(self, phase: str, due: bool) -> None:
        if due and phase in self._delays:
            time.sleep(self._delays[phase] / 1000)

    def _maybe_hang(self) -> None:
        now = time.monotonic()
        self._first_step_at = self._first_step_at or now
        for phase, since in (("hang", self._first_step_at), ("deadlock", self._asked_at)):
            if phase in self._delays and since is not None and now - since >= self._delays[phase] / 1000:
                self._stuck.wait()

    def _on_asked(self, _number: int, _frame: object) -> None:
        self._asked_at = time.monotonic()


def _starts_prefill(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return chunk.start == sequence.num_cached and sequence.num_output == 0
