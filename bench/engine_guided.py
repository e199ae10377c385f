"""Does guided decoding hold, and what does it cost?

    python bench/engine_guided.py [--schemas 200] [--pairs 9] [--json]

1. Random JSON schemas, each streamed and not: an answer whose finish_reason is not `length` must be valid (the
   jsonschema package judges), a cut one must be a prefix of JSON (a reader of our own judges).
2. Eight streams at once, guided (a schema each) and free in turns: tokens per second of both, and their ratio pair by pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.engine_smoke import DEFAULT_MODEL, engine, text
from tests.engine.schemas import accepts, is_json_prefix, random_schema

MOST_SLOWER = 0.10


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    """One chat request: its text, how it ended, its usage."""
    body = {"model": "bench", "messages": [{"role": "user", "content": "Answer with JSON."}]} | body
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return {"error": (await response.json())["error"]["message"]}
        if not body.get("stream"):
            whole = await response.json()
            choice = whole["choices"][0]
            return {
                "text": choice["message"]["content"],
                "reason": choice["finish_reason"],
                "tokens": whole["usage"]["completion_tokens"],
            }
        return await joined(response)


async def joined(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The events of one stream put together."""
    told: dict[str, Any] = {"text": "", "reason": None, "tokens": 0}
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            return {"error": chunk["error"]["message"]}
        for choice in chunk["choices"]:
            told["text"] += choice["delta"].get("content") or ""
            told["reason"] = choice["finish_reason"] or told["reason"]
        if chunk.get("usage"):
            told["tokens"] = chunk["usage"]["completion_tokens"]
    return told


def judged(schema: Any, answer: dict[str, Any]) -> str:
    if "error" in answer:
        return "refused"
    if answer["reason"] == "length":
        return "cut, a prefix" if is_json_prefix(answer["text"]) else "CUT, NO PREFIX"
    return "valid" if accepts(schema, answer["text"]) else "INVALID"


async def validity(session: aiohttp.ClientSession, count: int, seed: int) -> dict[str, Any]:
    """Every schema streamed and not, eight requests at a time."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(8)
    counts: Counter[str] = Counter()
    wrong: list[Any] = []

    async def one(schema: Any, at: int, streamed: bool) -> None:
        body = {"response_format": schema_format(schema), "max_tokens": 150, "seed": at, "stream": streamed}
        async with gate:
            answer = await ask(session, body)
        verdict = judged(schema, answer)
        counts[verdict] += 1
        if verdict not in ("valid", "cut, a prefix"):
            wrong.append({"schema": schema, "answer": answer})

    schemas = [random_schema(rng) for _ in range(count)]
    await asyncio.gather(*(one(schema, at, way) for at, schema in enumerate(schemas) for way in (False, True)))
    return {"schemas": count, "verdicts": dict(counts), "wrong": wrong}


def long_schema(at: int) -> Any:
    """An answer that goes on until max_tokens, with names of its own so that no two grammars are equal."""
    item = {
        "type": "object",
        "properties": {
            f"name_{at}": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["river", "stone", "lamp"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": [f"name_{at}", "kind", "count"],
        "additionalProperties": False,
    }
    return {"type": "object", "properties": {"items": {"type": "array", "items": item, "minItems": 500}}} | {
        "required": ["items"],
        "additionalProperties": False,
    }


async def rate(session: aiohttp.ClientSession, run: int, batch: int, tokens: int, guided: bool) -> float:
    """Tokens per second of `batch` streams at once, from the first request to the last byte."""
    bodies: list[dict[str, Any]] = []
    for at in range(batch):
        prompt = f"{run} {guided} {at} {text(at, 64)}"  # of its own, so that neither side finds the other's prefix
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "stream": True,
        }
        body |= {"ignore_eos": True, "seed": at, "stream_options": {"include_usage": True}}
        if guided:
            body["response_format"] = schema_format(long_schema(at))
        bodies.append(body)
    began = time.perf_counter()
    done = await asyncio.gather(*(ask(session, body) for body in bodies))
    seconds = time.perf_counter() - began
    assert all(answer.get("reason") == "length" for answer in done), done
    return sum(answer["tokens"] for answer in done) / seconds


def fastest(rates: list[float]) -> float:
    """Median of the fastest third: what a machine shared with others disturbs least."""
    ordered = sorted(rates, reverse=True)
    return statistics.median(ordered[: max(len(ordered) // 3, 1)])


async def cost(session: aiohttp.ClientSession, pairs: int, batch: int, tokens: int) -> dict[str, Any]:
    """Guided and free, one after the other, beginning with either in turn."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for run in range(-1, pairs):
        for guided in (run % 2 == 0, run % 2 != 0):
            measured = await rate(session, run + 1, batch, tokens, guided)
            if run >= 0:  # the first pair warms up
                rates[guided].append(measured)
    ratios = [guided / free for guided, free in zip(rates[True], rates[False], strict=True)]
    return {
        "batch": batch,
        "free_tokens_per_second": round(statistics.median(rates[False]), 1),
        "guided_tokens_per_second": round(statistics.median(rates[True]), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_of_fastest": round(fastest(rates[True]) / fastest(rates[False]), 4),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
    }


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        costs = await cost(session, options.pairs, options.batch, options.tokens) if options.pairs else None
        held = await validity(session, options.schemas, options.seed) if options.schemas else None
        async with session.get("/stats") as response:
            parts = (await response.json()).get("step_ms_by_part")
        return {"cost": costs, "validity": held, "step_ms_by_part": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with engine(options.model, []) as (url, _):
        found = asyncio.run(measure(url, options))
    wrong = found["validity"]["wrong"] if found["validity"] else []
    slow = found["cost"] is not None and found["cost"]["ratio"] < 1 - MOST_SLOWER
    found["ok"] = not wrong and not slow
    if options.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        print(found["cost"], found["validity"] and found["validity"]["verdicts"], sep="\n")
        for item in wrong[:5]:
            print(json.dumps(item, ensure_ascii=False))
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
