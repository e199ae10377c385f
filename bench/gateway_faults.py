"""A day of faults in minutes, behind two gateway processes: `python bench/gateway_faults.py [--seed N] [--faults M] [--json]`.

While clients ask (streaming and not, some hanging up), the upstream hangs, dies in the middle, answers 500, 429 or 503, sends
what is no event, splits characters, leaves its usage out; gateway processes are killed, Valkey is killed or stopped for a
while, PostgreSQL is stopped for a while. At the end each request that a client knows has one line in the ledger, which bills
at least what the client received and, where both know, exactly that; nothing is reserved, no slot is taken, nobody waits,
and the gateways hold no more descriptors than before. Exit code 1: a rule does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import psutil

from bench.gateway_limits import MODEL, served
from bench.gateway_processes import rss_mib
from bench.gateway_queue import gateway_processes
from bench.stack import Stack, eventually, free_port, now, scrape
from bench.upstream import Upstream, event, framed, streamed

AT_ONCE = 24
SLOTS = 16
A_FAULT = 20  # requests between two faults, on average
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PROCESS_FAULTS = ("kill_gateway", "kill_valkey", "stop_valkey", "stop_postgres")
PROCESS_SHARE = 0.08  # of all faults; the others are the upstream's


class Faulty(Upstream):
    """Misbehaves when it is told to, once for each telling."""

    def __init__(self) -> None:
        super().__init__(delay_s=0.005)
        self.todo: list[str] = []
        self.kinds: dict[str, Callable[[asyncio.StreamWriter], Awaitable[None]]] = {
            "hang": self._hang,
            "die_at_once": self._die,
            "die_in_the_middle": self._die_in_the_middle,
            "status_500": lambda writer: self._status(writer, 500),
            "status_503": lambda writer: self._status(writer, 503),
            "status_429": lambda writer: self._status(writer, 429),
            "nonsense": self._nonsense,
            "split_characters": self._split,
            "no_usage": self._no_usage,
        }

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.todo:
            await self.kinds[self.todo.pop()](writer)
        else:
            await super().answer(body, writer)

    async def _hang(self, writer: asyncio.StreamWriter) -> None:
        for _ in range(100):
            await asyncio.sleep(0.1)
            if writer.transport.is_closing():
                break
        raise ConnectionResetError

    async def _die(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        raise ConnectionResetError

    async def _die_in_the_middle(self, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + event({"choices": [{"index": 0, "delta": {"content": "some"}, "finish_reason": None}]}))
        await writer.drain()
        await asyncio.sleep(0.02)
        await self._die(writer)

    async def _status(self, writer: asyncio.StreamWriter, status: int) -> None:
        body = b'{"error":{"message":"no","type":"x","param":null,"code":null}}'
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    async def _nonsense(self, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + framed(b"data: {not json\n\n") + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def _split(self, writer: asyncio.StreamWriter) -> None:
        """A character's bytes in several chunks, as bytes of the stream are cut anywhere."""
        data = event({"choices": [{"index": 0, "delta": {"content": "naïve 日本"}, "finish_reason": None}]})
        payload = data.split(b"\r\n", 1)[1][:-2]
        writer.write(STREAM)
        for at in range(0, len(payload), 3):
            writer.write(framed(payload[at : at + 3]))
            await writer.drain()
        *_, tail = streamed()
        writer.write(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + tail)

    async def _no_usage(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(part for part in streamed() if b'"usage"' not in part))


@dataclass
class Told:
    """What one client knows of its request."""

    request_id: str = ""
    status: int = 0
    pieces: int = 0  # of text, as they came; an answer in one piece counts as one
    billed: int | None = None  # completion tokens, as the answer itself told
    left: bool = False


async def ask(session: aiohttp.ClientSession, url: str, key: str, source: random.Random) -> Told:
    """One request of some kind; a tenth of the clients leave at some moment."""
    told, stream = Told(), source.random() < 0.6
    body = {
        "model": MODEL, "stream": stream, "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}],
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip

    async def read() -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            told.status = response.status
            told.request_id = response.headers.get("x-request-id", "")
            if not stream or response.status != 200:
                answer = json.loads(await response.read())
                if response.status == 200:
                    told.pieces = bool(answer["choices"][0]["message"]["content"])
                    told.billed = answer["usage"]["completion_tokens"]
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    take(told, json.loads(line[6:]))

    reading = asyncio.create_task(read())
    if source.random() < 0.1:
        await asyncio.wait({reading}, timeout=source.uniform(0, 0.03))
        told.left = reading.cancel()
    try:
        await reading
    except (aiohttp.ClientError, ConnectionError, asyncio.CancelledError, json.JSONDecodeError):
        told.billed = None
    return told


def take(told: Told, chunk: dict[str, Any]) -> None:
    """One event of a stream."""
    if chunk.get("usage"):
        told.billed = chunk["usage"]["completion_tokens"]
    for choice in chunk.get("choices", ()):
        told.pieces += bool(choice["delta"].get("content"))


class Day:
    """The faults of one run, by a seed."""

    def __init__(self, stack: Stack, upstream: Faulty, url: str, seed: int) -> None:
        self.stack, self.upstream, self.url = stack, upstream, url
        self.source = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.told: list[Told] = []

    async def run(self, key: str, faults: int) -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=40)) as session:

            async def one() -> None:
                async with gate:
                    self.told.append(await ask(session, self.url, key, self.source))

            tasks: list[asyncio.Task[None]] = []
            for _ in range(faults):
                tasks += [asyncio.create_task(one()) for _ in range(self.source.randrange(1, 2 * A_FAULT))]
                await self._fault()
                while sum(not task.done() for task in tasks) > 4 * AT_ONCE:
                    await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)

    async def _fault(self) -> None:
        if self.source.random() < PROCESS_SHARE:
            kind = self.source.choice(PROCESS_FAULTS)
            await asyncio.to_thread(getattr(self, "_" + kind))
        else:
            kind = self.source.choice(sorted(self.upstream.kinds))
            self.upstream.todo.append(kind)
        self.done[kind] += 1

    def _kill_gateway(self) -> None:
        workers = gateway_processes(self.stack)
        if workers:
            os.kill(self.source.choice(workers), signal.SIGKILL)

    def _pid(self, name: str) -> int:
        """Of a server, once it is there again after the fault before."""
        return int(eventually(lambda: self.stack.pid(name), 20, TypeError))

    def _kill_valkey(self) -> None:
        os.kill(self._pid("valkey"), signal.SIGKILL)

    def _stop_valkey(self) -> None:
        self._stopped("valkey", 0.6)

    def _stop_postgres(self) -> None:
        self._stopped("postgres", 1.5)

    def _stopped(self, name: str, seconds: float) -> None:
        process = psutil.Process(self._pid(name))
        every = [process, *process.children(recursive=True)]
        for each in every:
            each.suspend()
        time.sleep(seconds)
        for each in every:
            each.resume()


async def run(seed: int, faults: int) -> dict[str, Any]:
    upstream = Faulty()
    await upstream.start()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    stack = Stack(EGRESS_ALLOW="127.0.0.1", GATEWAYS="2", GATEWAY_PORT=str(port))
    try:
        await asyncio.to_thread(set_up, stack, upstream, url)
        made = await asyncio.to_thread(
            stack.manage, "key", "create", "--tenant", "default", "--json", "--concurrency", "500", "--budget", "day=1000"
        )  # fmt: skip
        key = json.loads(made)
        await asyncio.to_thread(served, stack, url)
        before = {pid: psutil.Process(pid).num_fds() for pid in gateway_processes(stack)}
        day, since = Day(stack, upstream, url, seed), now()
        await asyncio.to_thread(_known, url, key["key"])
        began = time.monotonic()
        await day.run(key["key"], faults)
        took = time.monotonic() - began
        return await asyncio.to_thread(reckon, stack, day, key["id"], since, max(before.values()), took)
    finally:
        await asyncio.to_thread(stack.close)
        await upstream.stop()


def set_up(stack: Stack, upstream: Upstream, url: str) -> None:
    """An endpoint of 16 slots with short deadlines and a price."""
    stack.up()
    at = f"http://127.0.0.1:{upstream.port}"
    stack.manage("endpoint", "add", MODEL, "--url", at, "--model", MODEL, "--slots", str(SLOTS), "--route", MODEL)
    deadlines = ("--deadline-s", "5", "--first-token-deadline-s", "2", "--inter-token-deadline-s", "2")
    stack.manage("route", "set", MODEL, *deadlines)
    stack.manage("price", "set", MODEL, "--input", "0.5", "--output", "1.5")
    served(stack, url)


def _known(url: str, key: str) -> None:
    import urllib.request

    def known() -> bool:
        for _ in range(8):
            request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request, timeout=5) as response:
                response.read()
        return True

    eventually(known, 15, OSError)


def reckon(stack: Stack, day: Day, key_id: str, since: Any, fds: int, took: float) -> dict[str, Any]:
    """Compare what everybody knows, once all is shipped."""
    known = [told for told in day.told if told.request_id]
    ids = {told.request_id for told in known}

    def shipped() -> list[dict[str, Any]] | None:
        mine = [record for record in stack.usage(since) if record["key_id"] == key_id]
        return mine if ids <= {record["request_id"] for record in mine} else None

    try:
        records = eventually(shipped, 90)
    except TimeoutError:
        records = [record for record in stack.usage(since) if record["key_id"] == key_id]
    lines = Counter(record["request_id"] for record in records)
    billed = {record["request_id"]: record["completion_tokens"] for record in records}
    short = [told for told in known if billed.get(told.request_id, 0) < told.pieces]
    wrong = [told for told in known if told.billed is not None and billed.get(told.request_id) != told.billed]

    def at_rest() -> dict[str, Any] | None:
        use = json.loads(stack.manage("limits", "show", "--key", key_id, "--json"))["use"]
        idle = Decimal(use["concurrency"]["used"]) == 0 and Decimal(use["budget_day"]["reserved"]) == 0
        gauges = scrape(f"{day.url}/metrics")
        quiet = gauges["fanlight_slots_in_use"] == 0 and gauges["fanlight_waiting"] == 0
        return use if idle and quiet and not gauges["fanlight_in_flight"] else None

    try:
        use = eventually(at_rest, 20, OSError, KeyError, TypeError)
    except TimeoutError:
        use = None
    after = [psutil.Process(pid).num_fds() for pid in gateway_processes(stack)]
    spent = sum((Decimal(record["cost"]) for record in records), Decimal(0))
    return {
        "requests": len(day.told), "known": len(known), "records": len(records), "took_s": round(took, 1),
        "faults": dict(day.done), "statuses": dict(Counter(told.status for told in day.told)),
        "outcomes": dict(Counter(record["outcome"] for record in records)),
        "spent_in_valkey": use and use["budget_day"]["used"], "ledger": str(spent),
        "fds": {"before": fds, "after": after}, "rss_mib": [round(rss_mib(pid)) for pid in gateway_processes(stack)],
        "rules": {
            "each_known_request_has_one_line": all(lines[each] == 1 for each in ids),
            "no_line_twice": all(count == 1 for count in lines.values()),
            "none_billed_short": not short,
            "billed_what_the_answer_said": not wrong,
            "nothing_reserved_no_slot_taken_nobody_waits": use is not None,
            "no_descriptor_leaked": all(count <= fds + 2 * SLOTS for count in after),
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the faults, for CI")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    result = asyncio.run(run(options.seed, max(int(options.faults * options.scale), 10)))
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            if name != "rules":
                print(f"{name}: {value}")
        for rule, holds in result["rules"].items():
            print(f"{'ok  ' if holds else 'MISS'} {rule}")
    return 0 if all(result["rules"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
