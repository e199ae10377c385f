"""What each of the last steps did, and where its time went. Numbers only: no tokens, no text.

Written on the step thread; any thread may read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from engine.types import Step

KEPT = 1024


class Parts:
    """A stopwatch that knows what each lap was for."""

    __slots__ = ("began", "laps", "last")

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()
        self.laps: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """What happened since the last mark was this."""
        now = time.monotonic()
        self.laps[name] = now - self.last
        self.last = now

    @property
    def total(self) -> float:
        """Seconds from the beginning to the last mark."""
        return self.last - self.began


class StepRecord(NamedTuple):
    """One step: its batch, and seconds by part. `runner` is what the runner says of its own part, in milliseconds."""

    step: int
    began: float
    seconds: float
    sequences: int
    decode_tokens: int
    prefill_tokens: int
    cached_tokens: int
    admitted: int
    preempted: int
    swapped_out: int
    swapped_in: int
    running: int
    waiting: int
    parts: Mapping[str, float]
    runner: Mapping[str, float]

    @classmethod
    def of(cls, step: Step, parts: Parts, runner: Mapping[str, float], running: int, waiting: int) -> StepRecord:
        """The record of a committed step."""
        return cls(
            step.index,
            parts.began,
            parts.total,
            len(step.chunks),
            step.decode_tokens,
            step.num_tokens - step.decode_tokens,
            step.cached_tokens,
            step.admitted,
            len(step.preempted),
            len(step.copies_out),
            len(step.copies_in),
            running,
            waiting,
            parts.laps,
            dict(runner),
        )

    def as_dict(self) -> dict[str, Any]:
        """As `/debug/steps` shows it: times in milliseconds, the beginning in monotonic nanoseconds."""
        shown = self._asdict()
        shown["began_ns"] = int(shown.pop("began") * 1e9)
        shown["ms"] = round(shown.pop("seconds") * 1e3, 3)
        shown["parts"] = {name: round(seconds * 1e3, 3) for name, seconds in self.parts.items()}
        shown["runner"] = {name: round(ms, 3) for name, ms in self.runner.items()}
        return shown


class StepLog:
    """The last steps, and seconds by part since the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._records: deque[StepRecord] = deque(maxlen=KEPT)

    def append(self, record: StepRecord) -> None:
        """Keep a record; the oldest goes."""
        self._records.append(record)
        for name, seconds in record.parts.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds by part, averaged over the steps that are kept."""
        records = list(self._records)
        sums: dict[str, float] = {}
        for record in records:
            for name, seconds in record.parts.items():
                sums[name] = sums.get(name, 0.0) + seconds
        return {name: round(seconds * 1e3 / len(records), 4) for name, seconds in sums.items()}

    def last(self, count: int) -> list[StepRecord]:
        """The newest records, oldest first."""
        records = list(self._records)
        return list(islice(records, max(0, len(records) - count), None))
