"""Does the engine's pure core keep its promises? Random schedules against an oracle that recomputes everything.

    python bench/engine_schedules.py --count 10000 [--first SEED] [--jobs N] [--json]

Each seed makes a small world in which blocks, slots or time are always short; its runner's next token is a hash of all
tokens read through the block table, so one wrong block anywhere changes the output. After every step the block pool,
the host cache and the queue are audited, and at every admission the starvation bound of engine/fairness.py. Exit
status 1, with the seed, when something does not hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.engine.schedules import World, seeded, tally

BATCH = 100


class Played(NamedTuple):
    """What a batch of seeds came to."""

    counts: Counter[str]
    passed_most: float
    failures: list[str]


def play(seeds: range) -> Played:
    """Play a batch of seeds."""
    counts: Counter[str] = Counter()
    most, failures = 0.0, []
    for seed in seeds:
        world = World(seeded(seed))
        try:
            world.play()
        except (AssertionError, LookupError) as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
            continue
        counts += tally(world)
        most = max(most, world.passed_most)
    return Played(counts, most, failures)


def main() -> int:
    """Play all, print figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="schedules (default: 10,000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed (default: 0)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    began, end = time.monotonic(), options.first + options.count
    batches = [range(at, min(at + BATCH, end)) for at in range(options.first, end, BATCH)]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        played = list(pool.imap_unordered(play, batches))
    failures = [failure for batch in played for failure in batch.failures]
    figures = {
        "schedules": options.count,
        "identical_to_oracle": options.count - len(failures),
        "failures": failures[:20],
        "most_of_the_starvation_bound_used": round(max(batch.passed_most for batch in played), 3),
        "seconds": round(time.monotonic() - began, 1),
        **dict(sorted(sum((batch.counts for batch in played), Counter()).items())),
    }
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:>34}  {value}" for name, value in figures.items()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
