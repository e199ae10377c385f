"""A stand-in for an external endpoint: answers chat completions after a while, and counts what it holds at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

PROMPT_TOKENS = 12
WORDS = ("The", " capital", " of", " France", " is", " Paris", ".")


class Upstream:
    """HTTP/1.1 by hand on loopback. `delay_s` is how long each answer takes."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.held = 0
        self.most = 0
        self.served: list[tuple[float, str]] = []  # when each answer was complete, and the caller's word for itself
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        while self.held:
            await asyncio.sleep(0.01)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:")
                await self.answer(json.loads(await reader.readexactly(length)), writer)
        self._open.discard(writer)
        writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """One answer; raise ConnectionError to hang up."""
        self.held += 1
        self.most = max(self.most, self.held)
        try:
            await asyncio.sleep(self.delay_s)
            if writer.transport.is_closing():
                raise ConnectionResetError
            writer.write(b"".join(streamed() if body.get("stream") else whole()))
            await writer.drain()
            self.served.append((time.monotonic(), str(body["messages"][-1]["content"])))
        finally:
            self.held -= 1


def usage() -> dict[str, Any]:
    total = PROMPT_TOKENS + len(WORDS)
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(WORDS), "total_tokens": total}


def whole() -> Iterator[bytes]:
    message = {"role": "assistant", "content": "".join(WORDS)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    body = json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage()}).encode()
    yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def streamed() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    for word in WORDS:
        yield event({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
    yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    yield event({"choices": [], "usage": usage()})
    yield framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def event(value: dict[str, Any]) -> bytes:
    return framed(b"data: " + json.dumps(value).encode() + b"\n\n")


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
