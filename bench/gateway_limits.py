"""Limits under 500 clients at once and two gateway processes: `python bench/gateway_limits.py [--quick] [--json]`.

Each limit in turn, streaming and not, on a key of its own: what is admitted never exceeds it, each refusal names it, and
after each run nothing is reserved and what Valkey has as spent is the ledger's sum to the last digit. Exit code 1: a rule
does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp

from bench.stack import Stack, eventually, free_port, now
from bench.upstream import PROMPT_TOKENS, WORDS, Upstream

MODEL = "stand-in"
ANSWER = len(WORDS)
BODY = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
TRIES = 2  # of each client
TOLD = {"requests_per_minute": "requests", "tokens_per_minute": "tokens", "input_tokens_per_minute": "tokens",
        "output_tokens_per_minute": "tokens"}  # fmt: skip
ALLOWANCE = ("limit", "remaining", "reset")
COST = Decimal(PROMPT_TOKENS * 500_000 + ANSWER * 1_500_000).scaleb(-12)
# option, limit, how a refusal names it
CASES = {
    "requests_per_minute": ("--rpm", "60", "requests per minute"),
    "tokens_per_minute": ("--tpm", "5000", "tokens per minute"),
    "input_tokens_per_minute": ("--input-tpm", "4000", "input tokens per minute"),
    "output_tokens_per_minute": ("--output-tpm", "300", "output tokens per minute"),
    "concurrency": ("--concurrency", "8", "requests at once"),
    "budget_day": ("--budget", "day=0.004", "USD per day"),
}


@dataclass
class Seen:
    """What the clients of one case were told."""

    admitted: int = 0
    refused: int = 0
    unnamed: int = 0  # refusals that do not name the limit, or say neither when to come back nor not to
    bare: int = 0  # answers of any kind without the limit's x-ratelimit-* headers
    others: dict[int, int] = field(default_factory=dict)


async def clients(url: str, key: str, count: int, stream: bool, name: str) -> Seen:
    """`count` clients at once, each asking TRIES times on a key with the limit of this name."""
    words, kind = CASES[name][2], TOLD.get(name)
    seen = Seen()
    body = json.dumps({**BODY, "stream": stream}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def one(session: aiohttp.ClientSession) -> None:
        for _ in range(TRIES):
            async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
                text = await response.text()
                told = response.headers
            seen.bare += kind is not None and not all(f"x-ratelimit-{what}-{kind}" in told for what in ALLOWANCE)
            if response.status == 200:
                seen.admitted += 1
            elif response.status == 429:
                seen.refused += 1
                seen.unnamed += words not in text or not ("retry-after" in told or "x-should-retry" in told)
            else:
                seen.others[response.status] = seen.others.get(response.status, 0) + 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(one(session) for _ in range(count)))
    return seen


def within(name: str, limit: str, admitted: int, most: int) -> bool:
    """Whether what was admitted (all of it within one window) is within the limit."""
    if name == "concurrency":
        return most <= int(limit)
    if name == "budget_day":
        return admitted * COST <= Decimal(limit.removeprefix("day="))
    each = {
        "requests_per_minute": 1,
        "tokens_per_minute": PROMPT_TOKENS + ANSWER,
        "input_tokens_per_minute": PROMPT_TOKENS,
        "output_tokens_per_minute": ANSWER,
    }[name]
    return admitted * each <= int(limit)


async def case(stack: Stack, upstream: Upstream, url: str, name: str, stream: bool, count: int) -> dict[str, Any]:
    """One limit, streaming or not."""
    option, limit, _ = CASES[name]
    made = await asyncio.to_thread(
        stack.manage, "key", "create", "--tenant", "default", "--json", option, limit, "--budget", "month=1000"
    )
    facts = json.loads(made)
    since = now()
    upstream.most = 0
    await asyncio.to_thread(known_to_both, stack, url, facts["key"])
    before = len(upstream.served)
    seen = await clients(url, facts["key"], count, stream, name)
    reached = len(upstream.served) - before
    records = await asyncio.to_thread(_ledger, stack, since, facts["id"], seen.admitted)
    use = json.loads(await asyncio.to_thread(stack.manage, "limits", "show", "--key", facts["id"], "--json"))["use"]
    spent = sum((Decimal(record["cost"]) for record in records), Decimal(0))
    rules = {
        "within_the_limit": within(name, limit, max(seen.admitted, reached), upstream.most),
        "some_were_admitted": seen.admitted > 0,
        "each_refusal_names_it": seen.unnamed == 0,
        "each_answer_tells_what_is_left": seen.bare == 0,
        "nobody_was_told_anything_else": not seen.others,
        "nothing_reserved": all(Decimal(each["reserved"]) == 0 for each in use.values())
        and Decimal(use["concurrency"]["used"]) == 0,
        "spent_is_the_ledgers_sum": all(
            Decimal(each["used"]) == spent for limit_name, each in use.items() if limit_name.startswith("budget_")
        ),
    }
    return {
        "limit": name, "stream": stream, "admitted": seen.admitted, "refused": seen.refused, "others": seen.others,
        "most_at_once": upstream.most, "spent": str(spent), "rules": rules,
    }  # fmt: skip


def known_to_both(stack: Stack, url: str, key: str) -> None:
    """Until both processes know the key: several connections, since the kernel chooses who takes one."""
    import urllib.request

    def known() -> bool:
        for _ in range(8):
            request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request, timeout=5) as response:
                response.read()
        return True

    eventually(known, 15, OSError)


def _ledger(stack: Stack, since: Any, key_id: str, admitted: int) -> list[dict[str, Any]]:
    """The key's usage records, once all that was admitted is among them."""

    def billed() -> list[dict[str, Any]] | None:
        mine = [record for record in stack.usage(since) if record["key_id"] == key_id]
        done = sum(record["completion_tokens"] > 0 for record in mine) >= admitted
        return mine if done else None

    return list(eventually(billed, 60))


async def run(count: int) -> dict[str, Any]:
    upstream = Upstream(delay_s=0.02)
    await upstream.start()
    port = free_port()
    stack = Stack(EGRESS_ALLOW="127.0.0.1", GATEWAYS="2", GATEWAY_PORT=str(port))
    try:
        await asyncio.to_thread(stack.up)
        url = f"http://127.0.0.1:{upstream.port}"
        endpoint = ("endpoint", "add", MODEL, "--url", url, "--model", MODEL, "--slots", "0", "--route", MODEL)
        await asyncio.to_thread(stack.manage, *endpoint)
        await asyncio.to_thread(stack.manage, "price", "set", MODEL, "--input", "0.5", "--output", "1.5")
        await asyncio.to_thread(served, stack, f"http://127.0.0.1:{port}")
        cases = [
            await case(stack, upstream, f"http://127.0.0.1:{port}", name, stream, count)
            for name in CASES
            for stream in (False, True)
        ]
    finally:
        await asyncio.to_thread(stack.close)
        await upstream.stop()
    return {"clients": count, "cases": cases, "holds": all(all(each["rules"].values()) for each in cases)}


def served(stack: Stack, url: str) -> None:
    """Until the endpoint answers through the gateway."""
    import urllib.request

    key = stack.key()

    def answers() -> bool:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(BODY).encode(), headers)
        with urllib.request.urlopen(request, timeout=5) as response:
            return bool(response.status == 200)

    eventually(answers, 60, OSError)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="60 clients")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    result = asyncio.run(run(60 if options.quick else options.clients))
    if options.json:
        print(json.dumps(result))
        return 0 if result["holds"] else 1
    for each in result["cases"]:
        missed = [rule for rule, holds in each["rules"].items() if not holds]
        how = "streamed" if each["stream"] else "whole"
        figures = f"{each['admitted']} admitted, {each['refused']} refused, {each['most_at_once']} at once"
        print(
            f"{'MISS' if missed else 'ok  '} {each['limit']:24} {how:9} {figures}  {' '.join(missed)} {each['others'] or ''}"
        )
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
