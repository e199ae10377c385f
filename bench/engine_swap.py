"""How much faster does a preempted sequence come back from host memory than by computing it again?

    python bench/engine_swap.py [--model PATH] [--tokens 1000] [--rounds 7] [--json]

In one process, without HTTP: a prompt is computed, its sequence preempted, the device's cache overwritten by another
prompt, and the clock runs from the step that admits it again to its next token. Once with a host cache, once without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.boot import Engine, build
from engine.config import EngineConfig
from engine.sequence import Sequence
from engine.types import SamplingParams, Status, Step

DEFAULT_MODEL = ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 16


class Swapper:
    """An engine stepped by hand, with a pool that holds the sequence and little else."""

    def __init__(self, model: Path, tokens: int, host_blocks: int) -> None:
        blocks = -(-tokens // BLOCK) + 8
        config = EngineConfig(model, num_blocks=blocks, num_host_blocks=host_blocks, block_size=BLOCK)
        self.engine: Engine = build(config)
        self.scheduler = self.engine.scheduler
        self.tokens = tokens
        self._next = 0

    def add(self, tokens: int, max_tokens: int) -> Sequence:
        self._next += 1
        prompt = [(self._next * 7919 + at * 104729) % 40_000 + 100 for at in range(tokens)]
        sequence = Sequence(self._next, prompt, SamplingParams(max_tokens, temperature=0.0, stop_token_ids=frozenset()))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        step = self.scheduler.schedule()
        runner = self.engine.runner
        self.scheduler.complete(step, runner.sample(step, runner.forward(step)))

    def resume(self) -> float:
        """Milliseconds from readmission to the next token."""
        sequence = self.add(self.tokens, 60)
        while sequence.num_output < 3:
            self.step()
        self._preempt(sequence)
        # It would be admitted before anybody new: it waits aside until the device holds nothing of it.
        self.scheduler.waiting.remove(sequence)
        other = self.add(self.scheduler.pool.num_blocks * BLOCK, 1)
        while other.status is not Status.FINISHED:
            self.step()
        self.scheduler.waiting.add(sequence)
        before, began = sequence.num_output, time.perf_counter()
        while sequence.num_output == before:
            self.step()
        took = (time.perf_counter() - began) * 1e3
        self.scheduler.abort([sequence.id])
        return took

    def _preempt(self, victim: Sequence) -> None:
        """As a decode without a free block does; the copies then run, as they would in its step."""
        step = Step(0)
        self.scheduler.running.remove(victim)
        self.scheduler._preempt(victim, step)
        host = self.engine.runner.host
        if host is not None:
            host.copy_out(step.copies_out)
        self.scheduler.host.settle()


def main() -> int:
    """Measure both, print figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    swapping = Swapper(options.model, options.tokens, 4 * options.tokens // BLOCK)
    computing = Swapper(options.model, options.tokens, 0)
    swap, compute = [], []
    for _ in range(options.rounds):
        swap.append(swapping.resume())
        compute.append(computing.resume())
    assert swapping.scheduler.counts.swapped_in_blocks >= options.rounds * (options.tokens // BLOCK - 1)
    figures = {
        "tokens": options.tokens,
        "path": type(swapping.engine.runner).__name__,
        "swap_ms": round(statistics.median(swap), 2),
        "recompute_ms": round(statistics.median(compute), 2),
        "ratio": round(statistics.median(swap) / statistics.median(compute), 4),
        "swap_ms_all": [round(value, 1) for value in swap],
        "recompute_ms_all": [round(value, 1) for value in compute],
    }
    print(json.dumps(figures) if options.json else "\n".join(f"{name:>16}  {value}" for name, value in figures.items()))
    return 0 if figures["ratio"] <= 0.2 else 1


if __name__ == "__main__":
    sys.exit(main())
