"""The console's sockets: who may open one, what comes over it, and that nothing hangs with it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from django.conf import settings
from django.test import Client

from console import contract
from console.base.models import User
from console.base.sockets import off_loop, same_origin
from console.dashboards import feed, overview
from console.playground.consumers import Frames
from console.routing import websocket_urlpatterns
from console.telemetry import kept
from serving.port import Delta, Principal
from tests.e2e.world import World, deliver, settled
from tests.e2e.world import shared_world as shared_world

HOST = [(b"host", b"testserver:8000"), (b"origin", b"http://testserver:8000")]


def cookie_of(user: User) -> bytes:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    name = settings.SESSION_COOKIE_NAME
    return f"{name}={client.cookies[name].value}".encode()


class Socket(ApplicationCommunicator):
    """A browser's end of a WebSocket. channels.testing has one too, but imports daphne for it."""

    async def connect(self) -> tuple[bool, int]:
        await self.send_input({"type": "websocket.connect"})
        answer = await self.receive_output(timeout=5)
        if answer["type"] == "websocket.close":
            return False, answer.get("code", 1000) or 403
        return True, 0

    async def send_to(self, text: str) -> None:
        await self.send_input({"type": "websocket.receive", "text": text})

    async def receive_from(self, timeout: float = 5) -> str:
        answer = await self.receive_output(timeout)
        assert answer["type"] == "websocket.send", answer
        text: str = answer["text"]
        return text

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(5)


def socket(path: str, cookie: bytes = b"", headers: list[tuple[bytes, bytes]] | None = None) -> Socket:
    path, _mark, query = path.partition("?")
    scope = {
        "type": "websocket", "path": path, "query_string": query.encode(), "subprotocols": [],
        "headers": [*(HOST if headers is None else headers), (b"cookie", cookie)],
    }  # fmt: skip
    return Socket(AuthMiddlewareStack(URLRouter(websocket_urlpatterns)), scope)


class FakeInference:
    """Streams what it is told to, and remembers how it ended."""

    def __init__(self, pieces: int = 5, pause: float = 0.0, error: Delta | None = None) -> None:
        self.pieces, self.pause, self.error = pieces, pause, error
        self.asked: list[tuple[Principal, dict[str, Any]]] = []
        self.closed = 0
        self.queued = 0  # its place, when it has to wait

    async def chat(self, principal: Principal, body: dict[str, Any]) -> AsyncIterator[Delta]:
        self.asked.append((principal, body))
        same = {"request_id": "0190-id", "prompt_tokens": 10, "cached_tokens": 4}
        try:
            if self.queued:
                yield Delta(kind="queued", request_id="0190-id", position=self.queued, depth=12)
            yield Delta(kind="started", request_id="0190-id")
            if self.error is not None:
                yield self.error
                return
            for n in range(self.pieces):
                await asyncio.sleep(self.pause)
                yield Delta(
                    kind="delta", text=f"w{n} ", completion_tokens=n + 1, ttft_ms=5.0, elapsed_ms=6.0 + n, **same
                )
            yield Delta(kind="done", finish_reason="stop", completion_tokens=self.pieces, **same)
        finally:
            self.closed += 1


@pytest.fixture
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeInference]:
    fake = FakeInference()
    monkeypatch.setattr(contract, "inference", lambda: fake)
    yield fake


async def frames_until(ws: Socket, *kinds: str) -> list[dict[str, Any]]:
    found = []
    while not found or found[-1]["type"] not in kinds:
        found.append(json.loads(await ws.receive_from(timeout=8)))
    return found


# ---- the door ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (b"http://testserver:8000", b"testserver:8000", True),
        (b"http://TESTSERVER:8000", b"testserver:8000", True),
        (b"http://testserver:3000", b"testserver:8000", False),  # another program on the same machine
        (b"http://evil.example", b"testserver:8000", False),
        (b"null", b"testserver:8000", False),
        (b"", b"testserver:8000", False),
        (b"file://testserver:8000", b"testserver:8000", False),
    ],
)
def test_only_our_own_pages_open_sockets(origin: bytes, host: bytes, allowed: bool) -> None:
    assert same_origin({b"origin": origin, b"host": host}) is allowed


@pytest.mark.parametrize("path", ["/ws/overview/", "/ws/playground/"])
async def test_a_foreign_origin_is_refused(shared_world: World, path: str) -> None:
    cookie = await off_loop(cookie_of, shared_world.owner)
    ws = socket(path, cookie, [(b"host", b"testserver"), (b"origin", b"http://evil.example")])
    connected, _code = await ws.connect()
    assert connected is False


@pytest.mark.parametrize("path", ["/ws/overview/", "/ws/playground/"])
async def test_without_signing_in_a_socket_is_closed(shared_world: World, path: str) -> None:
    ws = socket(path)
    await ws.connect()
    assert await ws.receive_output(timeout=5) == {"type": "websocket.close", "code": 4401}


# ---- overview ----------------------------------------------------------------------------------------------------


async def test_the_overview_sends_whole_snapshots_of_ones_own(shared_world: World) -> None:
    await off_loop(
        deliver,
        settled(shared_world.aurora, shared_world.key),
        settled(shared_world.borealis, shared_world.foreign_key, model="borealis-model"),
    )
    cookie = await off_loop(cookie_of, shared_world.owner)
    ws = socket("/ws/overview/?range=15m&language=zh-hans&zone=Asia/Shanghai", cookie)
    await ws.connect()
    text = await ws.receive_from(timeout=8)
    message = json.loads(text)
    assert message["type"] == "snapshot" and set(message["parts"]) == set(overview.PARTS)
    assert sum(message["series"]["ok"]) == 1
    assert "borealis" not in text and "secret-path" not in text
    assert "副本" in message["parts"]["verdict"]
    await ws.disconnect()
    assert len(feed.hub) == 0


async def test_many_watchers_share_one_computation(shared_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    original = overview.take

    def counting(*args: Any) -> overview.Snapshot:
        taken.append(time.monotonic())
        return original(*args)

    monkeypatch.setattr(overview, "take", counting)
    cookies = [await off_loop(cookie_of, u) for u in (shared_world.owner, shared_world.member, shared_world.viewer)]
    sockets = [socket("/ws/overview/?range=1h", c) for c in cookies * 3]
    for ws in sockets:
        await ws.connect()
    for ws in sockets:
        assert json.loads(await ws.receive_from(timeout=8))["type"] == "snapshot"
    await asyncio.sleep(1.2)
    assert len(feed.hub) == 1
    assert len(taken) <= 4
    assert all(later - earlier >= 0.5 for earlier, later in zip(taken, taken[1:], strict=False))
    for ws in sockets:
        await ws.disconnect()


async def test_a_hanging_query_holds_up_nobody_else(shared_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original = overview.take

    def hanging(scope: Any, key: str, *more: Any) -> overview.Snapshot:
        if scope.tenant_ids == (shared_world.aurora.id,):
            release.wait(20)
        return original(scope, key, *more)

    monkeypatch.setattr(overview, "take", hanging)
    monkeypatch.setattr(feed, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(kept, "CEILING_S", 0.5)  # what hung counts as dear
    stuck = socket("/ws/overview/", await off_loop(cookie_of, shared_world.owner))
    fine = socket("/ws/overview/", await off_loop(cookie_of, shared_world.stranger))
    await stuck.connect()
    assert json.loads(await stuck.receive_from(timeout=5)) == {"type": "stale"}
    await fine.connect()
    assert json.loads(await fine.receive_from(timeout=5))["type"] == "snapshot"
    assert not release.is_set()  # another's snapshot came while the query hung
    release.set()
    while json.loads(await stuck.receive_from(timeout=8))["type"] != "snapshot":
        pass
    for ws in (stuck, fine):
        await ws.disconnect()


async def test_numbers_that_cannot_be_made_are_told_and_logged_once(
    shared_world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: Any) -> overview.Snapshot:
        raise ValueError("no numbers today")

    monkeypatch.setattr(overview, "take", broken)
    monkeypatch.setattr(overview.kept, "_floor_s", 0.01)
    ws = socket("/ws/overview/", await off_loop(cookie_of, shared_world.owner))
    await ws.connect()
    for _ in range(3):
        assert json.loads(await ws.receive_from(timeout=5)) == {"type": "stale"}
    await ws.disconnect()
    assert [r.message for r in caplog.records if "no numbers today" in r.message] == [
        "overview: numbers of 1h could not be made: no numbers today"
    ]


# ---- playground --------------------------------------------------------------------------------------------------


async def opened(world: World, user: User, tenant: Any = None) -> Socket:
    tenant = tenant or world.aurora
    ws = socket(f"/ws/playground/?tenant={tenant.id}&language=en", await off_loop(cookie_of, user))
    await ws.connect()
    return ws


SEND = {
    "type": "send",
    "column": 0,
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Hi"}],
    "params": {"temperature": 0, "seed": 7, "evil": 1, "top_k": ""},
}


async def test_an_answer_streams_with_its_figures(shared_world: World, inference: FakeInference) -> None:
    ws = await opened(shared_world, shared_world.member)
    await ws.send_to(json.dumps(SEND))
    frames = await frames_until(ws, "done")
    assert frames[0]["type"] == "started" and frames[0]["request_id"] == "0190-id"
    assert "".join(f.get("text", "") for f in frames) == "w0 w1 w2 w3 w4 "
    assert frames[-1]["completion_tokens"] == 5 and frames[-1]["cached_tokens"] == 4
    principal, body = inference.asked[0]
    assert (principal.source, principal.tenant_id) == ("playground", str(shared_world.aurora.id))
    assert body == {"model": "smollm2", "messages": SEND["messages"], "stream": True, "temperature": 0, "seed": 7}
    assert inference.closed == 1
    await ws.disconnect()


async def test_who_waits_is_told_the_place(shared_world: World, inference: FakeInference) -> None:
    inference.queued = 3
    ws = await opened(shared_world, shared_world.member)
    await ws.send_to(json.dumps(SEND))
    first, second = (await frames_until(ws, "done"))[:2]
    assert (first["type"], first["position"], first["depth"], second["type"]) == ("queued", 3, 12, "started")
    await ws.disconnect()


async def test_stopping_closes_the_pipelines_iterator(shared_world: World, inference: FakeInference) -> None:
    inference.pieces, inference.pause = 1000, 0.01
    ws = await opened(shared_world, shared_world.owner)
    await ws.send_to(json.dumps(SEND))
    await frames_until(ws, "delta")
    await ws.send_to(json.dumps({"type": "stop", "column": 0}))
    frames = await frames_until(ws, "stopped")
    assert inference.closed == 1 and frames[-1]["column"] == 0
    await ws.send_to(json.dumps(SEND | {"column": 1}))
    await frames_until(ws, "delta")
    await ws.disconnect()
    assert inference.closed == 2


async def test_frames_come_at_most_thirty_times_a_second(shared_world: World, inference: FakeInference) -> None:
    inference.pieces, inference.pause = 400, 0.001
    ws = await opened(shared_world, shared_world.owner)
    await ws.send_to(json.dumps(SEND))
    began = time.monotonic()
    frames = await frames_until(ws, "done")
    assert len(frames) <= 30 * (time.monotonic() - began) + 3
    assert "".join(f.get("text", "") for f in frames) == "".join(f"w{n} " for n in range(400))
    await ws.disconnect()


async def test_two_columns_run_side_by_side(shared_world: World, inference: FakeInference) -> None:
    inference.pause = 0.01
    ws = await opened(shared_world, shared_world.owner)
    for column in (0, 1):
        await ws.send_to(json.dumps(SEND | {"column": column}))
    done: set[int] = set()
    while len(done) < 2:
        frame = json.loads(await ws.receive_from(timeout=8))
        if frame["type"] == "done":
            done.add(frame["column"])
    assert len(inference.asked) == 2
    await ws.disconnect()


async def test_errors_of_the_pipeline_are_passed_on(shared_world: World, inference: FakeInference) -> None:
    inference.error = Delta(
        kind="error", request_id="0190-id", status=503, code="service_unavailable", message="No replica is ready."
    )
    ws = await opened(shared_world, shared_world.owner)
    await ws.send_to(json.dumps(SEND))
    frame = (await frames_until(ws, "error"))[-1]
    assert (frame["status"], frame["code"], frame["message"]) == (503, "service_unavailable", "No replica is ready.")
    await ws.disconnect()


async def test_a_process_without_a_gateway_says_so(shared_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise contract.NotServing("This process has no gateway.")

    monkeypatch.setattr(contract, "inference", none)
    ws = await opened(shared_world, shared_world.owner)
    await ws.send_to(json.dumps(SEND))
    assert "no gateway" in (await frames_until(ws, "error"))[-1]["message"]
    await ws.disconnect()


@pytest.mark.parametrize("who", ["viewer", "stranger", "nobody"])
async def test_nobody_sends_in_anothers_name(shared_world: World, inference: FakeInference, who: str) -> None:
    ws = await opened(shared_world, getattr(shared_world, who))
    frame = (await frames_until(ws, "error"))[-1]
    assert "cannot send requests" in frame["message"]
    assert inference.asked == []


async def test_signing_out_ends_the_right_to_send(shared_world: World, inference: FakeInference) -> None:
    ws = await opened(shared_world, shared_world.owner)
    await off_loop(User.objects.filter(pk=shared_world.owner.pk).update, is_active=False)
    await ws.send_to(json.dumps(SEND))
    assert await ws.receive_output(timeout=5) == {"type": "websocket.close", "code": 4401}
    assert inference.asked == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"type":"send"}',
        '{"type":"send","column":9}',
        '{"type":"x","column":0}',
        '{"type":"stop","column":true}',
    ],
)
async def test_nonsense_is_answered_not_obeyed(shared_world: World, inference: FakeInference, text: str) -> None:
    ws = await opened(shared_world, shared_world.owner)
    await ws.send_to(text)
    assert (await frames_until(ws, "error"))[-1]["code"] == "invalid_message"
    assert inference.asked == []
    await ws.disconnect()


async def test_a_slow_reader_of_frames_gets_all_text_in_few(anyio_backend: str = "asyncio") -> None:
    frames = Frames()
    frames.add(Delta(kind="started", request_id="r"))
    for n in range(100):
        frames.add(Delta(kind="delta", request_id="r", text=str(n), completion_tokens=n + 1))
    frames.end()
    found = []
    while (frame := await frames.next()) is not None:
        found.append(frame)
    assert [f["type"] for f in found] == ["started", "delta"]
    assert found[1]["text"] == "".join(map(str, range(100))) and found[1]["completion_tokens"] == 100
