"""Who holds which KV blocks right now, for people and pages. Reads from any thread.

The parts are copied one after another while the engine goes on, so a block may change hands in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.scheduler import Scheduler
from engine.sequence import Sequence

MAX_BLOCKS = 65_536
MAX_SEQUENCES = 256
MAX_RUNS = 256


def block_map(scheduler: Scheduler) -> dict[str, Any]:
    """Every block's state, the running sequences' tables as runs, and those that wait without blocks."""
    pool, host = scheduler.pool, scheduler.host
    picture = pool.picture()
    free, cached, withheld = (picture.count(kind) for kind in ".c-")
    live = [*tuple(scheduler.running), *tuple(scheduler.waiting)]
    return {
        "block_size": pool.block_size,
        "num_blocks": pool.num_blocks,
        "free": free,
        "cached": cached,
        "withheld": withheld,
        "held": len(picture) - free - cached - withheld,
        "blocks": picture[:MAX_BLOCKS],
        "host": {"slots": host.num_slots, "used": host.num_used},
        "sequences": [_sequence(sequence) for sequence in live[:MAX_SEQUENCES]],
        "sequences_left_out": max(0, len(live) - MAX_SEQUENCES),
    }


def _sequence(sequence: Sequence) -> dict[str, Any]:
    table = tuple(sequence.block_table)
    return {
        "id": sequence.id,
        "status": sequence.status.value,
        "prompt_tokens": sequence.num_prompt,
        "output_tokens": sequence.num_output,
        "in_kv": sequence.num_computed,
        "cached_tokens": sequence.num_cached,
        "preemptions": sequence.preemptions,
        "blocks": len(table),
        "table": _runs(table),
    }


def _runs(table: Iterable[int]) -> list[list[int]]:
    """[[first block, how many in a row], …] in the table's order; at most MAX_RUNS."""
    runs: list[list[int]] = []
    for block in table:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        elif len(runs) == MAX_RUNS:
            break
        else:
            runs.append([block, 1])
    return runs
