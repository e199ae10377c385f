"""A long run against a stack of its own: `python bench/soak.py [--scale 0.01] [--json]`.

Small requests, a tenth of them hung up at a random point, in waves. Between waves the memory of every process is read. At
the end the ledger must hold exactly the requests that were dispatched, at least what clients received, the engine must
be idle with every block free, and memory must be flat: the later waves' median within 15 % of the earlier waves'. The worker
touches its KV pool block by block, so it is flat only once a wave has been through the whole pool (a full run); in any run
it must stay within weights + pool + 1,200 MB: torch and the tokenizer take 0.4 GB, and on the plain path oneDNN's kernels and
what the allocator keeps grow to about as much again and stay. (Alone, on the fused path: bench/engine_soak.py, 600 MB.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from bench import clients
from bench.rules import tell
from bench.stack import MODEL, Stack, now, running_stack

REQUESTS = 100_000
WAVES = 20
AT_ONCE = 32
WATCHED = ("web", "shipper", "controller", "worker")
BLOCKS_A_REQUEST = 3  # at least: 60 tokens with the template's system prompt
OVERHEAD = 1_200_000_000


async def wave(stack: Stack, key: str, count: int, source: random.Random) -> list[clients.Answer]:
    """`count` requests of about 32 tokens in and 8 out, AT_ONCE at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(session: Any) -> clients.Answer:
        async with gate:
            hang_up = source.uniform(0.005, 0.5) if source.random() < 0.1 else None
            prompt = " ".join(str(source.randrange(1000)) for _ in range(8))
            return await clients.stream(session, stack.url, key, prompt, hang_up, model=MODEL, max_tokens=8)

    async with clients.session() as session:
        return list(await asyncio.gather(*(one(session) for _ in range(count))))


def memory(stack: Stack) -> dict[str, int]:
    """Resident bytes of the watched processes."""
    return {name: psutil.Process(stack.pid(name)).memory_info().rss for name in WATCHED}


def growth(samples: list[dict[str, int]]) -> dict[str, float]:
    """Later half's median over the earlier half's, without the first wave, which fills caches."""
    settled = samples[1:]
    half = len(settled) // 2
    return {
        name: statistics.median(each[name] for each in settled[half:])
        / statistics.median(each[name] for each in settled[: half or 1])
        for name in WATCHED
    }


def run(scale: float) -> dict[str, Any]:
    """The soak at `scale` of its full length; returns figures and whether each rule holds."""
    source, total = random.Random(1), max(WAVES, int(REQUESTS * scale))
    with running_stack() as stack:
        key, since = stack.key(), now()
        answers: list[clients.Answer] = []
        samples = []
        for _ in range(WAVES):
            answers += asyncio.run(wave(stack, key, total // WAVES, source))
            samples.append(memory(stack))
        worker = json.loads(next((stack.data / "workers").glob("*/ready.json")).read_text())
        idle_s = stack.wait_idle(60)
        known = [answer for answer in answers if answer.request_id]
        records = {each["request_id"]: each for each in stack.settled(since, len(known), 120)}
        short = [
            a for a in known if a.request_id in records and records[a.request_id]["completion_tokens"] < len(a.stamps)
        ]
        ratios = growth(samples)
    touched = total // WAVES * BLOCKS_A_REQUEST >= worker["num_blocks"]
    rules = {
        "every_dispatched_request_in_the_ledger": all(answer.request_id in records for answer in known),
        "none_billed_short": not short,
        "answers_complete": all(answer.done or answer.broken == "hung up" for answer in answers),
        "blocks_whole_and_idle": idle_s <= 60,
        "memory_flat": all(ratio <= 1.15 for name, ratio in ratios.items() if name != "worker" or touched),
        "worker_within_its_plan": samples[-1]["worker"] <= worker["weights_bytes"] + worker["kv_bytes"] + OVERHEAD,
    }
    return {
        "requests": len(answers),
        "rss_mb": {name: [round(sample[name] / 1e6) for sample in samples] for name in WATCHED},
        "records": len(records),
        "memory_growth": ratios,
        "rules": rules,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full 100,000 requests")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    result = run(options.scale)
    return tell(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
