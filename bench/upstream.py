"""A stand-in for an external endpoint: answers chats and completions after a while, and counts what it holds at once."""

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
        self.held: set[asyncio.StreamWriter] = set()  # connections with a request in progress
        self.most = 0  # of them at once, those aside whose other end has hung up
        self.served: list[tuple[float, str]] = []  # when each answer was complete, and the caller's word for itself
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}

    async def start(self) -> None:
        """Listen: at any free port the first time, at the same one again after `stop`."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=4096)
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
        self._open[writer] = reader
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:")
                body = json.loads(await reader.readexactly(length))
                self.held.add(writer)
                # later: an end that came together with this request, on another connection, is seen first then
                asyncio.get_running_loop().call_soon(self._count)
                try:
                    await self.answer(body, writer)
                finally:
                    self.held.discard(writer)
        del self._open[writer]
        writer.close()

    def left(self, writer: asyncio.StreamWriter) -> bool:
        """Whether the other end has hung up."""
        return writer.transport.is_closing() or self._open[writer].at_eof()

    def _count(self) -> None:
        self.most = max(self.most, sum(not self.left(writer) for writer in self.held))

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """One answer; raise ConnectionError to hang up."""
        await asyncio.sleep(self.delay_s)
        if self.left(writer):
            raise ConnectionResetError
        await self.write(body, writer)
        asked = body["messages"][-1]["content"] if is_chat(body) else body["prompt"]
        self.served.append((time.monotonic(), str(asked)))

    async def write(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """The bytes of one answer, all at once."""
        writer.write(b"".join(streamed(is_chat(body)) if body.get("stream") else whole(is_chat(body))))
        await writer.drain()


def is_chat(body: dict[str, Any]) -> bool:
    return "messages" in body


def usage() -> dict[str, Any]:
    total = PROMPT_TOKENS + len(WORDS)
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(WORDS), "total_tokens": total}


def whole(chat: bool = True) -> Iterator[bytes]:
    yield one_piece(answered(chat) | {"usage": usage()})


def answered(chat: bool = True) -> dict[str, Any]:
    """A whole answer without its usage."""
    text = "".join(WORDS)
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice = {"index": 0, "logprobs": None, "finish_reason": "stop", **said}
    return {"id": "x", "object": "chat.completion" if chat else "text_completion", "choices": [choice]}


def one_piece(value: dict[str, Any]) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def streamed(chat: bool = True) -> Iterator[bytes]:
    """Head, words, end, usage, and the end of the stream."""
    yield STREAM
    for word in WORDS:
        yield piece(word, None, chat)
    yield piece("", "stop", chat)
    yield event({"choices": [], "usage": usage()})
    yield framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def piece(text: str, reason: str | None, chat: bool = True) -> bytes:
    """One event of one choice."""
    said = {"delta": {"content": text} if text else {}} if chat else {"text": text}
    return event({"choices": [{"index": 0, "finish_reason": reason, **said}]})


def event(value: dict[str, Any]) -> bytes:
    return framed(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
