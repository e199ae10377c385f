"""A whole gateway in front of a real vLLM, and requests that end in each of the ways that it can be brought to."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.adapters import adapter
from serving import apikey
from serving.metering import Billed
from serving.pipeline import Pipeline
from serving.port import Budget, Limits, Replica, Settled
from serving.request import Request
from serving.shipper import Shipper
from tests.serving.conftest import events
from tests.serving.fakes import KEY, MODEL, NARROW_KEY, OTHER_KEY, SECRET, Stack, replica, running
from tests.serving.outcomes import Row
from tests.serving.test_journal import Ledger
from tests.vllm.server import PARAMETERS, Server

CHAT = "/v1/chat/completions"
LATER_NS = 10**15  # over every deadline of a route
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS = {"max_tokens": 400, "ignore_eos": True}


@dataclass(frozen=True)
class Real:
    """How a row is brought about on a real engine."""

    body: dict[str, Any] = field(default_factory=dict)
    freeze_after: bool = False  # its core does not step after the first tokens
    crowd: int = 0  # requests past the gateway that take its room
    slots: int = PARAMETERS["max_num_seqs"] + 4  # more than it has, so that only its own bound refuses


@contextlib.asynccontextmanager
async def in_front_of(server: Server, root: Path, slots: int, **settings: Any) -> AsyncIterator[Stack]:
    async with running(root, engines=0, **settings) as stack:
        made = replica_of(server, slots)
        stack.snapshots.change(replicas={made.id: made})
        yield stack


def replica_of(server: Server, slots: int) -> Replica:
    facts = server.facts
    return replica(
        server.uds,
        engine="vllm",
        engine_version=facts.get("engine_version", ""),
        served_name=server.served_name,
        extras=adapter("vllm").extras,
        max_num_seqs=slots,
        num_blocks=facts.get("num_blocks", 0),
        block_size=facts.get("block_size", 0),
    )


class Play:
    """One row, streamed or not. `told` is the usage that the client saw, `seen` what the gateway had counted last."""

    def __init__(self, stack: Stack, server: Server, row: Row, real: Real, stream: bool) -> None:
        self.stack, self.server, self.row, self.real, self.stream = stack, server, row, real, stream
        self.key = NARROW_KEY if row.prepare == "access" else KEY
        self.tenant = "tenant-3" if row.prepare == "access" else "tenant-1"
        self.response: httpx.Response | None = None
        self.body = ""
        self.seen = 0
        self.prompt = 0

    @property
    def pipeline(self) -> Pipeline:
        pipeline = self.stack.gateway._pipeline
        assert pipeline is not None
        return pipeline

    async def __call__(self) -> None:
        """Let the request be asked, and end as its row says."""
        self._prepare()
        async with contextlib.AsyncExitStack() as around:
            await around.enter_async_context(self._others())
            asked = asyncio.create_task(self._ask())
            if self.row.how != "engine":
                request = await self._reached()
                if self.real.freeze_after:
                    around.enter_context(self.server.frozen())
                await self._end(asked, request)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(asked, 60)

    def _prepare(self) -> None:
        snapshots = self.stack.snapshots
        keys, digest = dict(snapshots.snapshot.keys), apikey.digest(self.key, SECRET)
        few = 1 if self.row.prepare == "limit" else None
        limits = Limits(output_tokens_per_minute=few, budgets=(Budget("day", 10**15),))
        keys[digest] = msgspec.structs.replace(keys[digest], limits=limits)
        snapshots.change(keys=keys)
        if self.row.prepare == "state":
            (only,) = snapshots.snapshot.replicas.values()
            snapshots.change(replicas={only.id: msgspec.structs.replace(only, state="loading")})

    @contextlib.asynccontextmanager
    async def _others(self) -> AsyncIterator[None]:
        """With the only slot, or all of the engine's room, taken by somebody else, if the row wants that."""
        through = 1 if self.row.prepare == "occupied" else 0
        before = self.server.stats()
        async with contextlib.AsyncExitStack() as around:
            gateway = await around.enter_async_context(client_of(self.stack, OTHER_KEY))
            direct = await around.enter_async_context(direct_to(self.server))
            body = {"messages": ASKED, **ENDLESS}
            tasks = [asyncio.create_task(gateway.post(CHAT, json={"model": MODEL, **body})) for _ in range(through)]
            named = {"model": self.server.served_name, **body}
            tasks += [asyncio.create_task(direct.post(CHAT, json=named)) for _ in range(self.real.crowd)]
            if tasks:
                await self._until(lambda: _busy(self.server, before, len(tasks)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self) -> None:
        asked = {"model": MODEL, "messages": ASKED, "temperature": 0, "stream": self.stream, "max_tokens": 40}
        if self.stream:
            asked["stream_options"] = {"include_usage": True}
        async with client_of(self.stack, self.key) as client:
            async with client.stream("POST", CHAT, json=asked | self.row.body | self.real.body) as response:
                self.response = response
                self.body = (await response.aread()).decode()

    async def _reached(self) -> Request:
        """Until tokens came, or where its room is taken, until it waits in the engine itself.

        Not just until it was sent: by its source, vLLM does not abort a request whose client leaves while it is taken
        over (a cancel inside `AsyncLLM.add_request`).
        """
        wanted = 0 if self.real.crowd else 2
        found: list[Request] = []

        def there() -> bool:
            ours = (r for r in self.pipeline.in_flight.values() if r.principal.tenant_id == self.tenant)
            found[:] = [r for r in ours if r.stamps.posted and r.counts.generated >= wanted]
            return bool(found) and (wanted > 0 or self.server.stats()["waiting"] > 0)

        await self._until(there)
        self.seen, self.prompt = found[0].counts.generated, found[0].counts.prompt
        return found[0]

    async def _end(self, asked: asyncio.Task[None], request: Request) -> None:
        match self.row.how:
            case "client":
                asked.cancel()
            case "deadline":
                self.pipeline.watched[request.id].check(request.stamps.posted + LATER_NS)
            case "stop":
                await self.stack.gateway.drain()
            case "kill":
                root = self.stack.settings.journal_root
                shutil.copytree(root, root.with_name("killed"))
                asked.cancel()

    async def _until(self, there: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not there():
                await asyncio.sleep(0.01)

    @property
    def told(self) -> dict[str, Any]:
        """The usage in the answer."""
        if not self.stream:
            usage: dict[str, Any] = httpx.Response(200, text=self.body).json()["usage"]
            return usage
        return next(event["usage"] for event in reversed(events(self.body)) if event != "[DONE]" and event["usage"])

    async def entry(self) -> Settled:
        """The one that was settled for its tenant."""
        settled = await self.stack.settled()
        if self.row.how == "kill":
            ledger = Ledger()
            shipper = Shipper(self.stack.settings.journal_root.with_name("killed"), ledger)
            shipper.run_once()
            shipper.close()
            settled = list(ledger.rows.values())
        (entry,) = (entry for entry in settled if entry.record.tenant_id == self.tenant)
        return entry


def billed(entry: Settled) -> Billed:
    usage = entry.usage
    assert usage is not None
    return Billed(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens)


def client_of(stack: Stack, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=60, verify=False)


def direct_to(server: Server) -> httpx.AsyncClient:
    """Past the gateway."""
    transport = httpx.AsyncHTTPTransport(uds=str(server.uds))
    return httpx.AsyncClient(base_url="http://localhost", transport=transport, timeout=60)


def _busy(server: Server, before: dict[str, Any], number: int) -> bool:
    stats = server.stats()
    return bool(stats["running"] + stats["waiting"] >= number and stats["steps"] > before["steps"])
