"""A scriptable engine on a real Unix socket, and a whole gateway behind a real port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from serving import apikey, journal
from serving.asgi import Gateway
from serving.port import (
    GatewaySettings,
    Price,
    Principal,
    Replica,
    ReplicaLoad,
    Route,
    Settled,
    Snapshot,
    Target,
)
from serving.telemetry.timeline import boot_id

SECRET = b"test-secret-of-32-bytes-or-more!!"
KEY = apikey.generate()
OTHER_KEY = apikey.generate()
NARROW_KEY = apikey.generate()
EXPIRED_KEY = apikey.generate()
REVOKED_KEY = apikey.generate()
MODEL = "tiny"
WORDS = ("Paris", " is", " the", " capital", " of", " France", ".")
PROMPT_TOKENS = 12
PRICE = Price(version=7, currency="USD", input=500_000, cached_input=50_000, output=1_500_000)
CACHED_TOKENS = 4


class EngineCall:
    """One request as the fake engine got it, and the means to answer it in any way, good or bad."""

    def __init__(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.path = path
        self.headers = headers
        self.body: dict[str, Any] = json.loads(body) if body else {}
        self.closed = asyncio.Event()  # the gateway closed the connection
        self.finished = False  # the answer was written to its end
        self.sent_tokens = 0
        self.received_ns = time.monotonic_ns()
        self.events: list[list[Any]] = [["RECEIVED", self.received_ns, {}]]
        self._writer = writer
        self._anchor = {"wall_ns": time.time_ns(), "mono_ns": time.monotonic_ns()}

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    def note(self, name: str, **args: Any) -> None:
        self.events.append([name, time.monotonic_ns(), args])

    async def head(self, status: int = 200, kind: str = "text/event-stream", **extra: str) -> None:
        headers = {"Content-Type": kind, "Transfer-Encoding": "chunked", **extra}
        lines = [f"HTTP/1.1 {status} X", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        self._writer.write("\r\n".join(lines).encode())
        await self._writer.drain()

    async def raw(self, data: bytes) -> None:
        """Bytes of the body, as one HTTP chunk."""
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self._writer.drain()

    async def event(self, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()
        await self.raw(b"data: " + data + b"\n\n")

    def choice(self, text: str | None, index: int = 0, finish: str | None = None, **extra: Any) -> dict[str, Any]:
        said = {"delta": {} if text is None else {"content": text}} if self.chat else {"text": text or ""}
        return {"index": index, **said, "logprobs": None, "finish_reason": finish, **extra}

    def chunk(self, *choices: dict[str, Any], usage: bool = True, **extra: Any) -> dict[str, Any]:
        value: dict[str, Any] = {
            "id": "engine-id",
            "object": "x",
            "created": 1,
            "model": "engine-model",
            "choices": list(choices),
            **extra,
        }
        if usage:
            value["usage"] = self.usage()
        return value

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": self.sent_tokens,
            "total_tokens": PROMPT_TOKENS + self.sent_tokens,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        }

    async def token(self, text: str, index: int = 0, *, tokens: int = 1, usage: bool = True, **extra: Any) -> None:
        self.sent_tokens += tokens
        await self.event(self.chunk(self.choice(text, index), usage=usage, **extra))

    def report(self) -> dict[str, Any]:
        return {
            "boot_id": boot_id(),
            "anchor": self._anchor,
            "events": self.events,
            "dropped": 0,
            "cached_tokens": CACHED_TOKENS,
            "computed_tokens": PROMPT_TOKENS - CACHED_TOKENS,
            "block_size": 16,
            "preemptions": 0,
        }

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()
        self.finished = True

    async def say(
        self,
        words: Iterable[str] = WORDS,
        *,
        finish: str = "stop",
        timeline: bool = True,
        gap_s: float = 0.0,
    ) -> None:
        """A well-behaved answer, as the embedded engine gives it."""
        self.note("TOKENIZED", prompt_tokens=PROMPT_TOKENS)
        self.note("QUEUED")
        self.note("SCHEDULED", cached_tokens=CACHED_TOKENS, step=1, running=1, waiting=0)
        self.note("CHUNK", tokens=8)
        await self.head()
        if self.chat:
            await self.event(
                self.chunk(
                    {
                        "index": 0,
                        "delta": {"role": "assistant", "content": ""},
                        "finish_reason": None,
                    }
                )
            )
        first = True
        for word in words:
            if first:
                self.note("FIRST_TOKEN")
            extra = {"fanlight": self.report()} if first and timeline else {}
            await self.token(word, **extra)
            first = False
            if gap_s:
                await asyncio.sleep(gap_s)
        self.note("FINISHED", reason=finish)
        await self.finish(finish, timeline=timeline)

    async def finish(self, reason: str = "stop", *, timeline: bool = False) -> None:
        await self.event(self.chunk(self.choice(None, finish=reason)))
        await self.event(self.chunk(**({"fanlight": self.report()} if timeline else {})))
        await self.event(b"[DONE]")
        await self.end()

    async def refuse(self, status: int, message: str = "no", **headers: str) -> None:
        await self.head(status, "application/json", **headers)
        error = {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "engine_code",
        }
        await self.raw(json.dumps({"error": error}).encode())
        await self.end()

    def die(self) -> None:
        """Break the connection without a word."""
        self._writer.transport.abort()

    async def until_closed(self) -> None:
        await self.closed.wait()


Script = Callable[[EngineCall], Awaitable[None]]


async def well(call: EngineCall) -> None:
    await call.say()


class FakeEngine:
    """Speaks HTTP/1.1 with keep-alive by hand, so that a test decides about every byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script: Script = well
        self.calls: list[EngineCall] = []
        self.connections = 0
        self._arrived = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, str(self.path))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def call(self, number: int = 1) -> EngineCall:
        """The `number`-th request, once it has come."""
        async with asyncio.timeout(5), self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= number)
        return self.calls[number - 1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        line, *rest = head.strip().split("\r\n")
        method, path, _ = line.split(" ")
        headers = {k.lower(): v for k, _, v in (item.partition(": ") for item in rest)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        call = EngineCall(method, path, headers, body, writer)
        self.calls.append(call)
        async with self._arrived:
            self._arrived.notify_all()
        watcher = asyncio.create_task(self._watch(reader, call))
        try:
            await self.script(call)
        except ConnectionError:
            call.closed.set()
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        return call.finished and not call.closed.is_set()

    async def _watch(self, reader: asyncio.StreamReader, call: EngineCall) -> None:
        """An engine learns of an abort by the connection's end. Peeks, so that keep-alive still works."""
        while not reader.at_eof():
            if reader.exception() is not None:
                break
            await asyncio.sleep(0.005)
        call.closed.set()


class FakeSnapshots:
    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def current(self) -> Snapshot:
        return self.snapshot

    def change(self, **changes: Any) -> None:
        version = self.snapshot.version + 1
        changes = {"taken_at": time.time(), **changes}
        self.snapshot = msgspec.structs.replace(self.snapshot, version=version, **changes)


class FakeLive:
    def load(self, replica_id: str) -> ReplicaLoad | None:
        return ReplicaLoad(at=time.time(), running=2, waiting=0, kv_usage=0.25, free_blocks=75, steps=9)


def replica(path: Path, number: int = 1, **changes: Any) -> Replica:
    facts: dict[str, Any] = {
        "id": f"replica-{number}",
        "name": f"tiny r{number}",
        "deployment_id": "deployment-1",
        "deployment_name": "tiny-cpu",
        "state": "ready",
        "engine": "embedded",
        "engine_version": "0.1.0",
        "runtime": "embedded 0.1.0",
        "device": "cpu",
        "epoch": 1,
        "uds": str(path),
        "served_name": "engine-tiny",
        "max_num_seqs": 8,
    }
    return Replica(**(facts | changes))


def principal(tenant: str = "tenant-1", **changes: Any) -> Principal:
    facts: dict[str, Any] = {
        "key_id": f"key-of-{tenant}",
        "key_name": "test",
        "tenant_id": tenant,
        "tenant_name": tenant.title(),
    }
    return Principal(**(facts | changes))


def route(**changes: Any) -> Route:
    facts: dict[str, Any] = {
        "id": "route-1",
        "name": MODEL,
        "targets": (Target("deployment-1"),),
        "created": 1_700_000_000,
        "max_model_len": 8192,
        "prices": {"USD": PRICE},
    }
    return Route(**(facts | changes))


def snapshot(replicas: Iterable[Replica], **route_changes: Any) -> Snapshot:
    keys = {
        KEY: principal(),
        OTHER_KEY: principal("tenant-2"),
        NARROW_KEY: principal("tenant-3", allowed_models=("another",)),
        EXPIRED_KEY: principal("tenant-4", expires_at=1.0),
        REVOKED_KEY: principal("tenant-5", revoked=True),
    }
    return Snapshot(
        version=1,
        taken_at=time.time(),
        keys={apikey.digest(key, SECRET): who for key, who in keys.items()},
        playground={},
        routes={MODEL: route(**route_changes), "another": route(id="route-2", name="another")},
        replicas={r.id: r for r in replicas},
    )


class Stack:
    """A gateway with a port, its journal, and the engines behind it."""

    def __init__(self, root: Path, engines: list[FakeEngine], snapshots: FakeSnapshots, **settings: Any) -> None:
        self.engines = engines
        self.snapshots = snapshots
        self.settings = GatewaySettings(
            **{
                "journal_root": root / "journal",
                "secret": SECRET,
                "version": "0.1.0",
                "instance": "test-1",
                "min_free_disk_bytes": 0,
                "drain_s": 5.0,
            }
            | settings
        )
        self.gateway = Gateway(self.settings, snapshots, FakeLive())
        self.port = 0

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def in_flight(self) -> int:
        pipeline = self.gateway._pipeline
        return len(pipeline.in_flight) if pipeline else 0

    async def idle(self) -> None:
        """Return when every request has settled."""
        async with asyncio.timeout(10):
            while self.in_flight:
                await asyncio.sleep(0.002)

    def entries(self) -> list[journal.Entry]:
        found: list[journal.Entry] = []
        for directory in journal.directories(self.settings.journal_root):
            for path in journal.segments(directory):
                found += [record.entry for record in journal.read(path)]
        return found

    async def settled(self) -> list[Settled]:
        await self.idle()
        return [entry for entry in self.entries() if isinstance(entry, Settled)]

    async def the_settled(self) -> Settled:
        """The one and only."""
        (entry,) = await self.settled()
        return entry


async def endless(call: EngineCall) -> None:
    """A script that goes on until the gateway hangs up."""
    await call.head()
    while not call.closed.is_set():
        await call.token("w")
        await asyncio.sleep(0.002)


async def breaks(call: EngineCall) -> None:
    """A script that dies after one word."""
    await call.head()
    await call.token("some")
    await asyncio.sleep(0.05)  # a reader that has not read yet must find the word before the reset
    call.die()


ORDINARY_PHASES = [
    "auth", "receive", "admission", "routing", "connect", "tokenize", "engine_queue", "prefill", "decode", "deliver",
    "settle",
]  # fmt: skip


@contextlib.asynccontextmanager
async def running(
    root: Path,
    *,
    engines: int = 1,
    replica_changes: dict[str, Any] | None = None,
    route_changes: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Start engines, gateway and server; stop them in the right order."""
    fakes = [FakeEngine(root / f"engine-{number}.sock") for number in range(1, engines + 1)]
    for fake in fakes:
        await fake.start()
    replicas = [replica(f.path, number, **(replica_changes or {})) for number, f in enumerate(fakes, 1)]
    stack = Stack(root, fakes, FakeSnapshots(snapshot(replicas, **(route_changes or {}))), **settings)
    await stack.gateway.startup()
    # by its protocol asyncio knows to send small writes at once; without, each answer takes 40 ms
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    stack.port = listener.getsockname()[1]
    config = uvicorn.Config(
        stack.gateway.http,
        lifespan="off",
        log_config=None,
        access_log=False,
        http="httptools",
        ws="none",
        interface="asgi3",
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield stack
    finally:
        await stack.gateway.shutdown()
        server.force_exit = True
        await server.shutdown(sockets=[listener])
        for fake in fakes:
            await fake.stop()
        listener.close()
