"""What does looking inside cost? Microseconds a step for records, timelines and metrics, against the step itself.

    python bench/engine_inside.py [--steps 2000] [--rounds 9] [--json]

Two step loops in one process with a runner that costs nothing, one that notes everything and one that notes nothing,
take turns over the same decodes. The difference of their medians is the cost, put in relation to the fastest steps the
engine has at that batch on two cores. Exit status 1 when it is 2 % or more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import asyncio

from engine import core as core_module
from engine.blocks import BlockPool
from engine.core import Abort, Add, EngineCore
from engine.grammar import NO_MASKS, Masks
from engine.metrics import EngineMetrics
from engine.outbox import Choice, Outbox
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.steps import StepRecord
from engine.timeline import Timeline
from engine.tokenizer import Detokenizer
from engine.types import Sampled, SamplingParams, Step

STEP_MS = {1: 4.0, 8: 8.0, 32: 17.5, 64: 28.0}
"""The fastest measured steps by batch; the slower the step, the smaller the share."""

LIMIT = 0.02
PROMPT = 100


class InstantRunner:
    """Samples the same token for everybody, at once."""

    def forward(self, step: Step) -> object:
        return {chunk.sequence.id: Sampled(5) for chunk in step.chunks if chunk.samples}

    def sample(self, step: Step, computed: Any, masks: Masks = NO_MASKS) -> dict[int, Sampled]:
        return dict(computed)


class TellingRunner(InstantRunner):
    """Says what its steps spent time on, as a real one may."""

    def parts(self) -> Mapping[str, float]:
        return {"linears": 3.0, "attention": 0.5, "rest": 0.5}


class Blind:
    """Observes nothing."""

    def on_step(self, record: StepRecord) -> None: ...

    def on_token(self, sequence: Sequence) -> None: ...

    def on_finish(self, sequence: Sequence) -> None: ...


class NoParts:
    """A stopwatch that stands still."""

    last = total = 0.0

    def mark(self, name: str) -> None: ...


@contextmanager
def blindfold() -> Iterator[None]:
    """Switch off everything that only looks."""
    record = StepRecord.of(Step(0), core_module.Parts(), {}, 0, 0)
    with (
        mock.patch.object(core_module, "Parts", NoParts),
        mock.patch.object(StepRecord, "of", lambda *_: record),
        mock.patch.object(core_module.StepLog, "append", lambda *_: None),
        mock.patch.object(Timeline, "note", lambda *_, **__: None),
    ):
        yield


class Loop:
    """A step loop driven from here, with `batch` sequences that decode."""

    def __init__(self, batch: int, steps: int, *, sees: bool) -> None:
        blocks = batch * (-(-(PROMPT + steps) // 16) + 2)
        limits = SchedulerLimits(max_num_seqs=batch, max_num_batched_tokens=max(512, batch))
        observer = EngineMetrics("bench") if sees else Blind()
        runner = TellingRunner() if sees else InstantRunner()
        self.core = EngineCore(Scheduler(BlockPool(blocks, 16), limits), runner, lambda out: None, observer)
        self.batch = batch
        self._next = 0

    def start(self, steps: int) -> None:
        """Sequences that decode for that many steps; prompts are computed before the clock runs."""
        for _ in range(self.batch):
            self._next += 1
            prompt = [self._next % 900 + at % 90 for at in range(PROMPT)]
            sequence = Sequence(self._next, prompt, SamplingParams(steps + 8))
            choice = Choice(0, sequence, Detokenizer([b"word "] * 1000), Outbox())
            self.core.post(Add(choice))
        self.core._drain()
        while any(s.remaining > 1 for s in self.core.scheduler.running) or len(self.core.scheduler.waiting):
            self.core._step()

    def run(self, steps: int) -> float:
        """Microseconds a step, drains included."""
        began = time.perf_counter()
        for _ in range(steps):
            self.core._drain()
            self.core._step()
        took = time.perf_counter() - began
        self.core.post(Abort(None))
        self.core._drain()
        self.core._flush()
        return took / steps * 1e6


def measure(batch: int, steps: int, rounds: int) -> dict[str, float]:
    """Medians over rounds that take turns."""
    seeing, blind = Loop(batch, steps, sees=True), Loop(batch, steps, sees=False)
    on, off = [], []
    for _ in range(rounds):
        seeing.start(steps)
        on.append(seeing.run(steps))
        with blindfold():
            blind.start(steps)
            off.append(blind.run(steps))
    cost = statistics.median(on) - statistics.median(off)
    return {
        "batch": batch,
        "on_us": round(statistics.median(on), 1),
        "off_us": round(statistics.median(off), 1),
        "cost_us": round(cost, 1),
        "step_ms": STEP_MS[batch],
        "share": round(cost / STEP_MS[batch] / 1e3, 5),
    }


async def main() -> int:
    """Measure all batches. On an event loop, as outboxes belong to one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    rows = [measure(batch, options.steps, options.rounds) for batch in STEP_MS]
    worst = max(row["share"] for row in rows)
    if options.json:
        print(json.dumps({"batches": rows, "worst_share": worst, "limit": LIMIT}))
    else:
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
        print(f"worst share {worst:.2%}, limit {LIMIT:.0%}")
    return 1 if worst >= LIMIT else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
