"""How fast is the engine? Tokens per second at several concurrencies, TTFT with and without cache.

    python bench/engine_smoke.py --model PATH [--concurrency 1 8 32] [--json]

Starts an engine of its own unless --url names one. Measures through HTTP with streaming clients in
another process, so the figures include the server, and the clients' share of the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
WORDS = "river stone lamp paper cloud engine garden window mirror bridge silver winter".split()


def text(seed: int, words: int) -> str:
    """Plain text of about one token a word, different for every seed."""
    return " ".join(WORDS[(seed * 7 + at * (seed % 11 + 1)) % len(WORDS)] for at in range(words))


async def stream(session: aiohttp.ClientSession, prompt: str, tokens: int, salt: str = "") -> dict[str, Any]:
    """One streamed request: seconds to the first token, all arrival times, usage."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    began, arrivals, usage = time.perf_counter(), [], {}
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                usage = chunk["usage"]
                arrivals.append(time.perf_counter())
    return {"ttft": arrivals[0] - began, "arrivals": arrivals, "usage": usage}


async def throughput(session: aiohttp.ClientSession, concurrency: int, tokens: int, runs: int) -> dict[str, Any]:
    """Decode rate with `concurrency` streams at once; median of `runs`."""
    rates, ttfts, gaps = [], [], []
    for run in range(runs):
        began = time.perf_counter()
        prompts = [text(run * 1000 + concurrency * 50 + at, 128) for at in range(concurrency)]
        done = await asyncio.gather(*(stream(session, prompt, tokens) for prompt in prompts))
        seconds = time.perf_counter() - began
        rates.append(sum(d["usage"]["completion_tokens"] for d in done) / seconds)
        ttfts += [d["ttft"] for d in done]
        for d in done:
            gaps += [b - a for a, b in zip(d["arrivals"], d["arrivals"][1:], strict=False)]
    return {
        "concurrency": concurrency,
        "tokens_per_second": round(statistics.median(rates), 1),
        "runs": [round(rate, 1) for rate in rates],
        "ttft_ms_p50": round(statistics.median(ttfts) * 1000, 1),
        "itl_ms_p50": round(statistics.median(gaps) * 1000, 1),
        "itl_ms_p99": round(statistics.quantiles(gaps, n=100)[98] * 1000, 1),
    }


async def prefix_ttft(session: aiohttp.ClientSession, runs: int) -> dict[str, Any]:
    """TTFT of a 600-token prefix: never seen, seen by the same tenant, seen by another one."""
    cold, warm, other = [], [], []
    for run in range(runs):
        prompt = text(run + 77, 600)
        cold.append(await stream(session, prompt, 1, "a"))
        warm.append(await stream(session, prompt, 1, "a"))
        other.append(await stream(session, prompt, 1, "b"))

    def ms(done: list[dict[str, Any]]) -> float:
        return round(statistics.median(d["ttft"] for d in done) * 1000, 1)

    return {
        "prompt_tokens": cold[0]["usage"]["prompt_tokens"],
        "uncached_ms": ms(cold),
        "cached_ms": ms(warm),
        "other_tenant_ms": ms(other),
        "cached_tokens": warm[0]["usage"]["prompt_tokens_details"]["cached_tokens"],
        "other_tenant_cached_tokens": other[0]["usage"]["prompt_tokens_details"]["cached_tokens"],
    }


@contextlib.contextmanager
def engine(model: Path, extra: list[str]) -> Iterator[tuple[str, float]]:
    """A fresh engine; yields its URL and the seconds from exec to ready."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "engine", "serve", "--model", str(model), "--port", "0"]
        command += ["--served-model-name", "bench", "--ready-file", str(ready), *extra]
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit("the engine did not start")
                time.sleep(0.01)
            yield json.loads(ready.read_text())["url"], time.perf_counter() - began
        finally:
            process.terminate()
            process.wait()


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, on one engine."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        began = time.perf_counter()
        await stream(session, "Hello", 1)
        first = time.perf_counter() - began
        return {
            "first_request_s": round(first, 3),
            "prefix": await prefix_ttft(session, options.runs),
            "throughput": [await throughput(session, n, options.tokens, options.runs) for n in options.concurrency],
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--url", help="an engine that serves a model named bench already")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    extra = ["--threads", str(options.threads)] if options.threads else []
    source = contextlib.nullcontext((options.url, 0.0)) if options.url else engine(options.model, extra)
    load_before = os.getloadavg()[0]
    with source as (url, ready_seconds):
        result = asyncio.run(measure(url, options))
    result |= {"ready_s": round(ready_seconds, 2), "load_average_before": round(load_before, 2)}
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
