"""Deliberate delays, for tests that ask whether a waterfall or a watchdog tells the truth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from engine.grammar import NO_MASKS, Masks
from engine.runner import Runner
from engine.types import Chunk, Sampled, Step


class FaultyRunner:
    """Wraps a runner and sleeps once per request in `prefill` or `decode`, or hangs for good.

    Delays are in milliseconds by phase. They stall the whole step, batch mates included. As its forward may block, it
    never says that it returns early: the step before is then delivered first.
    """

    def __init__(self, inner: Runner, delays: Mapping[str, float]) -> None:
        self._inner = inner
        self._delays = delays
        self._first_step_at: float | None = None
        self.parts: Callable[[], Mapping[str, float]] = getattr(inner, "parts", dict)

    def forward(self, step: Step) -> object:
        """See Runner."""
        for chunk in step.chunks:
            self._sleep("prefill", _starts_prefill(chunk))
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
        if "hang" not in self._delays:
            return
        self._first_step_at = self._first_step_at or time.monotonic()
        if time.monotonic() - self._first_step_at >= self._delays["hang"] / 1000:
            threading.Event().wait()


def _starts_prefill(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return chunk.start == sequence.num_cached and sequence.num_output == 0
