"""What a stranger without a key can make the web process hold or wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from console import bounded_http
from console.bounded_http import BoundedHttp

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def echo(_scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % size})


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config, state = uvicorn.Config(echo, log_config=None), ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: BoundedHttp(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        try:
            yield reader, writer
        finally:
            writer.close()
            while state.connections:
                for connection in list(state.connections):
                    connection.transport.abort()
                await asyncio.sleep(0)


async def flood(writer: asyncio.StreamWriter, start: bytes, pieces: Iterable[bytes]) -> bool:
    """Whether the other side hung up before it had taken all."""
    try:
        writer.write(start)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        return True
    return False


MEGABYTES = 64
FLOODS = {
    "one header without an end": (HEAD + b"X: ", b"a" * 65536),
    "headers without an end": (HEAD, b"X: 1\r\n" * 10000),
    "a path without an end": (b"GET /", b"a" * 65536),
    "trailers": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: 1\r\n" * 10000),
    "a chunk extension": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5;x=", b"a" * 65536),
}


@pytest.mark.parametrize("start, piece", FLOODS.values(), ids=FLOODS)
async def test_what_never_ends_is_cut(start: bytes, piece: bytes) -> None:
    async with connected() as (reader, writer):
        assert await flood(writer, start, (piece for _ in range(MEGABYTES * 16)))
        with contextlib.suppress(ConnectionError):
            assert (await reader.read())[:13] in (b"", b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")


async def test_large_bodies_in_any_shape_pass() -> None:
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"Content-Length: 4000000\r\n\r\n")
            writer.write(b"a" * 4_000_000)
            assert (await reader.readuntil(b" 4000000")).startswith(b"HTTP/1.1 200")
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 300_000 + b"0\r\n\r\n")
        assert (await reader.readuntil(b"  300000")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHo"])
async def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT_S", 0.05)
    async with connected() as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


async def test_a_second_head_on_the_same_connection_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT_S", 0.05)
    async with connected() as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1\r\n\r\na")
        assert (await reader.readuntil(b"       1")).startswith(b"HTTP/1.1 200")
        writer.write(b"POST / HT")
        assert await reader.read() == b""
