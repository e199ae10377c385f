"""2,000 clients on one replica of 16 slots, behind two gateway processes: `python bench/gateway_queue.py [--quick] [--json]`.

The upstream counts what it holds: never more than the slots. Every client gets an answer or a 503 that says when to come
back; nobody waits longer than the route allows; tenants of equal weight are served equally, one of double weight twice as
much; who hangs up while waiting frees the place. A gateway process is killed while it holds slots: they come back. Last, a
queue that is full tells when to come back: how far from when it was empty is reported.
Exit code 1: a rule does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import psutil

from bench.gateway_limits import BODY, MODEL, served
from bench.stack import Stack, eventually, free_port, now
from bench.upstream import Upstream

SLOTS = 16
ALLOWED_S = 10.5  # 10 s of the route, and half a second for everything else
BACK_S = 5.0  # slots of a process that was killed
ESTIMATED_S = 6.0  # of waiting in a full queue, shorter than what the route allows
MOVED = 8 * SLOTS  # answers until others come
TENANTS = {"one": 100, "two": 100, "double": 200}


@dataclass
class Seen:
    """What the clients were told, and how long they waited for it."""

    statuses: Counter[int] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)  # seconds at the gateway until it was refused, as it tells itself
    longest: float = 0.0  # of a client, connecting in the crowd included
    told: list[float] = field(default_factory=list)  # seconds after which to come back, of who was refused
    unsaid: int = 0  # 503 without a Retry-After of 1 to 60 whole seconds
    broken: int = 0


async def crowd(url: str, keys: dict[str, str], count: int, seen: Seen, hang_up: int = 0) -> None:
    """`count` clients at once, in turn of each tenant; the first `hang_up` leave after a second."""
    names = list(keys)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:

        async def one(number: int) -> None:
            name = names[number % len(names)]
            body = {**BODY, "messages": [{"role": "user", "content": name}], "stream": number % 2 == 0}
            headers = {"authorization": f"Bearer {keys[name]}"}
            began = time.monotonic()
            try:
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                    await response.read()
                    after = response.headers.get("retry-after", "")
                    inside = int(response.headers["openai-processing-ms"]) / 1000
            except aiohttp.ClientError:
                seen.broken += 1
                return
            seen.statuses[response.status] += 1
            seen.longest = max(seen.longest, time.monotonic() - began)
            if response.status == 503:
                seen.waits.append(inside)
                sensible = after.isdigit() and 1 <= int(after) <= 60
                seen.unsaid += not sensible
                seen.told += [float(after)] if sensible else []

        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        if hang_up:
            await asyncio.sleep(1)
            for task in tasks[:hang_up]:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def shares(upstream: Upstream, since: float, until: float) -> dict[str, float]:
    """Answers for each tenant by its weight, against the mean of them, in a time when all of them had some waiting."""
    counted = Counter(name for at, name in upstream.served if since <= at < until)
    each = {name: counted[name] / weight for name, weight in TENANTS.items()}
    mean = sum(each.values()) / len(each)
    return {name: round(value / mean, 3) if mean else 0.0 for name, value in each.items()}


async def full_house(stack: Stack, upstream: Upstream, url: str, keys: dict[str, str], count: int) -> dict[str, Any]:
    """Everybody at once."""
    seen, since = Seen(), now()
    upstream.most, began = 0, time.monotonic()
    await crowd(url, keys, count, seen)
    lines = await asyncio.to_thread(in_the_ledger, stack, since, count)
    evenly = shares(upstream, began + 1.5, began + 8.5)  # from the last one's arrival until the first gives up
    return {
        "clients": count, "statuses": dict(seen.statuses), "most_at_once": upstream.most,
        "longest_wait_s": max(seen.waits, default=0.0), "longest_at_a_client_s": round(seen.longest, 2),
        "service_by_weight": evenly, "in_the_ledger": lines,
        "rules": {
            "everybody_is_in_the_ledger_once": lines == count,
            "never_more_than_the_slots": upstream.most <= SLOTS,
            "the_slots_were_used": upstream.most == SLOTS,
            "an_answer_or_503_for_everybody": set(seen.statuses) <= {200, 503} and seen.broken == 0,
            "every_503_says_when_to_come_back": seen.unsaid == 0,
            "nobody_waited_longer": max(seen.waits, default=0.0) <= ALLOWED_S,
            "equal_service": all(abs(share - 1) <= 0.1 for share in evenly.values()),
        },
    }  # fmt: skip


def in_the_ledger(stack: Stack, since: datetime, count: int) -> int:
    """Requests that the ledger knows, once there are enough or a minute has passed."""

    def known() -> int:
        return sum(record["requests"] for record in stack.usage(since))

    with contextlib.suppress(TimeoutError):
        eventually(lambda: known() >= count, 60, pause_s=1)
    return known()


async def leavers(stack: Stack, upstream: Upstream, url: str, keys: dict[str, str], count: int) -> dict[str, Any]:
    """Most leave after a second: those who stay are served as if the others had never come."""
    seen = Seen()
    stay = SLOTS * 4
    began = time.monotonic()
    await crowd(url, keys, count, seen, hang_up=count - stay)
    took = time.monotonic() - began
    fair = 1 + 2 * upstream.delay_s * (stay / SLOTS + 2) + 1.0
    return {
        "left": count - stay, "stayed": stay, "statuses": dict(seen.statuses), "took_s": round(took, 2),
        "rules": {"their_places_are_free_at_once": seen.statuses[200] >= stay and took <= fair},
    }  # fmt: skip


async def killed(stack: Stack, upstream: Upstream, url: str, keys: dict[str, str]) -> dict[str, Any]:
    """kill -9 of one gateway process while both hold slots; then all slots can be had again."""
    delay, upstream.delay_s = upstream.delay_s, 4.0
    first = asyncio.create_task(crowd(url, keys, SLOTS, Seen()))
    await asyncio.sleep(1)
    victim = gateway_processes(stack)[0]
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    await first
    upstream.delay_s, upstream.most = delay, 0
    seen = Seen()
    while upstream.most < SLOTS and time.monotonic() - began < 20:
        await crowd(url, keys, SLOTS * 2, seen)
    took = time.monotonic() - began
    return {
        "all_slots_again_after_s": round(took, 2), "statuses": dict(seen.statuses),
        "rules": {"slots_of_the_dead_come_back": upstream.most == SLOTS and took <= BACK_S},
    }  # fmt: skip


async def estimates(stack: Stack, upstream: Upstream, url: str, keys: dict[str, str]) -> dict[str, Any]:
    """A queue of some seconds, moving and then full: what those are told who find no place, and when the last is served."""
    places = int(ESTIMATED_S * SLOTS / upstream.delay_s)
    await asyncio.to_thread(stack.manage, "route", "set", MODEL, "--max-queued", str(places))
    for _ in range(5):  # until both processes know of it
        late, before = Seen(), len(upstream.served)
        first = asyncio.create_task(crowd(url, keys, places, Seen()))
        while len(upstream.served) < before + MOVED:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await crowd(url, keys, MOVED * 2, late)
        took = time.monotonic() - began
        await first
        if late.told:
            break
    errors = [told / took - 1 for told in late.told]
    return {
        "statuses": dict(late.statuses), "empty_after_s": round(took, 2),
        "told_s": [min(late.told, default=0.0), max(late.told, default=0.0)],
        "mean_error": round(sum(errors) / len(errors), 3) if errors else None,
        "rules": {"a_full_queue_refuses": bool(errors), "every_503_says_when_to_come_back": late.unsaid == 0},
    }  # fmt: skip


def gateway_processes(stack: Stack) -> list[int]:
    """Pids of the workers that accept."""
    parent = psutil.Process(stack.pid("gateway"))
    return sorted(child.pid for child in parent.children() if "--inherited" in child.cmdline())


async def run(count: int) -> dict[str, Any]:
    upstream = Upstream(delay_s=0.25)
    await upstream.start()
    port = free_port()
    stack = Stack(EGRESS_ALLOW="127.0.0.1", GATEWAYS="2", GATEWAY_PORT=str(port))
    url, manage = f"http://127.0.0.1:{port}", stack.manage
    try:
        await asyncio.to_thread(stack.up)
        at = f"http://127.0.0.1:{upstream.port}"
        slots = ("--slots", str(SLOTS))
        await asyncio.to_thread(
            manage, "endpoint", "add", MODEL, "--url", at, "--model", MODEL, *slots, "--route", MODEL
        )
        await asyncio.to_thread(
            manage, "route", "set", MODEL, "--max-queued", "5000", "--max-queued-tokens", "90000000"
        )
        keys = {}
        for name, weight in TENANTS.items():
            await asyncio.to_thread(manage, "tenant", "create", name)
            await asyncio.to_thread(manage, "limits", "set", "--tenant", name, "--weight", str(weight))
            keys[name] = await asyncio.to_thread(stack.key, name)
        await asyncio.to_thread(served, stack, url)
        result = {
            "full_house": await full_house(stack, upstream, url, keys, count),
            "leavers": await leavers(stack, upstream, url, keys, count // 4),
            "killed": await killed(stack, upstream, url, keys),
            "estimates": await estimates(stack, upstream, url, keys),
        }
    finally:
        with contextlib.suppress(Exception):
            await asyncio.to_thread(stack.close)
        await upstream.stop()
    return result | {"holds": all(all(each["rules"].values()) for each in result.values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="900 clients")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    result = asyncio.run(run(900 if options.quick else options.clients))
    if options.json:
        print(json.dumps(result))
        return 0 if result["holds"] else 1
    for name, facts in result.items():
        if isinstance(facts, dict):
            rules = facts.pop("rules")
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
            for rule, holds in rules.items():
                print(f"  {'ok  ' if holds else 'MISS'} {rule}")
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
