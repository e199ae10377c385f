"""A day of faults in minutes, behind two gateway processes: `python bench/gateway_faults.py [--seed N] [--faults M] [--json]`.

Clients ask in four dialects, streaming and not, some hanging up, at an endpoint and at the engine that comes with us. First
`--requests` of them while the endpoint misbehaves: memory must stay flat. Then, through `--faults` faults, gateway processes,
the engine's worker, the endpoint, PostgreSQL and Valkey are killed too, or stopped for a while. At the end all who know something
of a request must know the same (bench/reckoning.py). The seed chooses the faults and the requests; which meets which is chance.
Exit code 1: a rule does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import psutil

from bench.asking import Told, ask
from bench.faulty import Faulty
from bench.gateway_limits import MODEL, known_to_both, served
from bench.gateway_processes import rss_mib
from bench.gateway_queue import gateway_processes
from bench.reckoning import NOT_YET, reckon, settled_descriptors
from bench.rules import tell
from bench.stack import MODEL as EMBEDDED
from bench.stack import Stack, eventually, free_port, now

AT_ONCE = 24
SLOTS = 16
A_FAULT = 20  # requests between two faults, on average
PROCESS_FAULTS = (
    "kill_gateway", "kill_worker", "kill_upstream", "kill_valkey", "stop_valkey", "kill_postgres", "stop_postgres",
)  # fmt: skip
PROCESS_SHARE = 0.08  # of all faults of the second part; the others are the endpoint's
TO_EMBEDDED = 0.03  # of all requests: the engine is slower than the stand-in by far
BACK_S = 5.0  # after a fault; the worker's restarts are up to a minute apart
COME_BACK_S = 0.2  # after a 503: sooner than it says, so that the day is short
SAMPLES = 40  # of memory, fewer in short runs
JUDGED_FROM = 20_000  # requests: before, what grows is caches that fill
FLAT = 1.05  # at the end of the line fitted through the samples, against its beginning


class Day:
    """The requests and faults of one run, by a seed."""

    def __init__(self, stack: Stack, upstream: Faulty, url: str, key: str, seed: int) -> None:
        self.stack, self.upstream, self.url, self.key = stack, upstream, url, key
        self.source = random.Random(seed)
        self.done: Counter[str] = Counter()  # faults of processes
        self.told: list[Told] = []
        self._gate = asyncio.Semaphore(AT_ONCE)
        self.rss: list[tuple[int, list[float]]] = []  # after how many requests, of each gateway process in MiB

    async def requests(self, count: int) -> None:
        """The first part: `count` requests, with only the endpoint at fault."""
        pids = await asyncio.to_thread(gateway_processes, self.stack)
        async with crowd() as session:
            each = count // max(4, min(SAMPLES, count // 500))
            while len(self.told) < count:
                await asyncio.gather(*self._clients(session, each, at_fault=1 / A_FAULT))
                self.rss.append((len(self.told), [rss_mib(pid) for pid in pids]))

    async def warm_up(self) -> None:
        """Requests without a fault."""
        async with crowd() as session:
            await asyncio.gather(*self._clients(session, 20 * AT_ONCE))

    async def faults(self, count: int) -> None:
        """The second part: `count` faults of any kind."""
        tasks: set[asyncio.Task[None]] = set()
        dealt, wanted = self._deal(count), self.happened().total() + count
        async with crowd() as session:
            while self.happened().total() < wanted:
                # a fault of the endpoint that met no request, since none was let through to it, did not happen
                kind = dealt.pop() if dealt else self._kind()
                asked = self._clients(session, self.source.randrange(1, 2 * A_FAULT))
                tasks |= {asyncio.create_task(each) for each in asked}
                await self._fault(kind)
                while len(tasks) > 2 * AT_ONCE:
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*done)
            await asyncio.gather(*tasks)

    def happened(self) -> Counter[str]:
        return self.done + self.upstream.happened

    def _clients(self, session: aiohttp.ClientSession, count: int, at_fault: float = 0.0) -> list[Any]:
        """`count` clients, one `at_fault`-th of them with the endpoint misbehaving next."""

        async def one() -> None:
            async with self._gate:
                if self.source.random() < at_fault:
                    self.upstream.next = self._kind()
                model = EMBEDDED if self.source.random() < TO_EMBEDDED else MODEL
                told = await ask(session, self.url, self.key, model, self.source)
                self.told.append(told)
                if told.status == 503:
                    await asyncio.sleep(COME_BACK_S)

        return [one() for _ in range(count)]

    def _kind(self) -> str:
        return self.source.choice(sorted(self.upstream.kinds))

    def _deal(self, count: int) -> list[str]:
        """`count` faults in any order, each kind of process fault among them."""
        of_processes = max(len(PROCESS_FAULTS), round(count * PROCESS_SHARE))
        dealt = [PROCESS_FAULTS[number % len(PROCESS_FAULTS)] for number in range(of_processes)]
        dealt += [self._kind() for _ in range(count - of_processes)]
        self.source.shuffle(dealt)
        return dealt

    async def _fault(self, kind: str) -> None:
        if kind not in PROCESS_FAULTS:
            self.upstream.next = kind
            return
        if kind == "kill_upstream":
            await self.upstream.restart()
            return
        how, name = kind.split("_")
        act = functools.partial(self._kill if how == "kill" else self._stop, name)
        with contextlib.suppress(TimeoutError):  # what is not back from an earlier fault cannot be killed again
            await asyncio.to_thread(eventually, act, BACK_S, IndexError, psutil.Error, *NOT_YET)
            self.done[kind] += 1

    def _process(self, name: str) -> psutil.Process:
        """It may be on its way back from the fault before, or known by a pid that is gone."""
        of_gateway = name == "gateway"
        return psutil.Process(self.source.choice(gateway_processes(self.stack)) if of_gateway else self.stack.pid(name))

    def _kill(self, name: str) -> bool:
        self._process(name).kill()
        return True

    def _stop(self, name: str) -> bool:
        """For a while: longer than a moment, shorter than it takes to be given up."""
        process = self._process(name)
        every = [process, *process.children(recursive=True)]
        for step in (signal.SIGSTOP, signal.SIGCONT):
            for each in every:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(step)
            if step == signal.SIGSTOP:
                time.sleep(self.source.uniform(0.3, 2.5))
        return True


def crowd() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))


def growth(samples: list[tuple[int, list[float]]]) -> list[dict[str, float]]:
    """For each process: the line through its samples without the first quarter, which fills caches."""
    settled = samples[len(samples) // 4 :]
    lines = []
    for process in zip(*(sizes for _, sizes in settled), strict=True):
        at = [float(requests) for requests, _ in settled]
        slope, start = statistics.linear_regression(at, process)
        first, last = start + slope * at[0], start + slope * at[-1]
        lines.append(
            {"first_mib": round(first, 1), "last_mib": round(last, 1), "ratio": round(last / first, 4),
             "kib_per_1000_requests": round(slope * 1000 * 1024, 2)}
        )  # fmt: skip
    return lines


async def run(seed: int, faults: int, requests: int) -> dict[str, Any]:
    upstream = Faulty(seed)
    await upstream.start()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    stack = Stack(EGRESS_ALLOW="127.0.0.1", GATEWAYS="2", GATEWAY_PORT=str(port))
    try:
        key = await asyncio.to_thread(set_up, stack, upstream, url)
        since, day = now(), Day(stack, upstream, url, key["key"], seed)
        await day.warm_up()
        fds = await asyncio.to_thread(settled_descriptors, stack)
        began = time.monotonic()
        await day.requests(requests)
        between, most = time.monotonic(), upstream.most
        first = await asyncio.to_thread(reckon, stack, url, day.told, key["id"], since, fds)
        began_faults = time.monotonic()
        await day.faults(faults)
        took = {"requests": round(between - began, 1), "faults": round(time.monotonic() - began_faults, 1)}
        last = await asyncio.to_thread(reckon, stack, url, day.told, key["id"], since, fds)
    finally:
        await asyncio.to_thread(stack.close)
        await upstream.stop()
    memory = growth(day.rss)
    flat = requests < JUDGED_FROM or all(each["ratio"] <= FLAT for each in memory)
    rules = {name: holds and first["rules"][name] for name, holds in last["rules"].items()}
    return {
        **last, "took_s": took, "faults": dict(day.happened()), "memory": memory,
        "memory_judged": requests >= JUDGED_FROM, "after_the_requests": first,
        "most_at_once": {"requests": most, "faults": upstream.most},
        "rules": rules | {"never_more_than_the_slots_while_all_live": most <= SLOTS, "memory_flat": flat},
    }  # fmt: skip


def set_up(stack: Stack, upstream: Faulty, url: str) -> dict[str, str]:
    """An endpoint of 16 slots with short deadlines and a price, and a key that both processes know."""
    stack.up()
    at = f"http://127.0.0.1:{upstream.port}"
    stack.manage("endpoint", "add", MODEL, "--url", at, "--model", MODEL, "--slots", str(SLOTS), "--route", MODEL)
    deadlines = ("--deadline-s", "5", "--first-token-deadline-s", "2", "--inter-token-deadline-s", "2")
    stack.manage("route", "set", MODEL, *deadlines)
    stack.manage("price", "set", MODEL, "--input", "0.5", "--output", "1.5")
    served(stack, url)
    limits = ("--concurrency", "500", "--budget", "day=1000")
    made: dict[str, str] = json.loads(stack.manage("key", "create", "--tenant", "default", "--json", *limits))
    known_to_both(stack, url, made["key"])
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--scale", type=float, default=1.0, help="share of both, for CI")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    faults, requests = int(options.faults * options.scale), int(options.requests * options.scale)
    result = asyncio.run(run(options.seed, max(faults, 10), max(requests, 500)))
    return tell(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
