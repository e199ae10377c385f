"""The little of HTTP that the endpoints need, over ASGI's three arguments."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from engine.errors import Overloaded, RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 32 << 20
_SAFE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Disconnected(Exception):
    """The client left before its body was complete."""


class Exchange:
    """One request and its response; every response carries x-request-id."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query = {
            name: values[-1] for name, values in parse_qs(scope.get("query_string", b"").decode("latin-1")).items()
        }
        self.receive = receive
        self._send = send
        self._headers = {k.lower(): v for k, v in scope["headers"]}
        self.request_id = safe_id(self.header("x-request-id")) or uuid.uuid4().hex
        self.started = False

    def header(self, name: str) -> str:
        """A request header, or an empty string."""
        return bytes(self._headers.get(name.encode(), b"")).decode("latin-1")

    async def body(self) -> bytes:
        """The whole body. Raises RequestError (413) or Disconnected."""
        parts, size, more = [], 0, True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY_BYTES:
                error = RequestError(f"The body exceeds {MAX_BODY_BYTES} bytes.", code="too_large")
                error.status = 413
                raise error
            more = message.get("more_body", False)
        return b"".join(parts)

    async def disconnected(self) -> None:
        """Return when the client has gone (or the response is complete)."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, content_type: str, extra: dict[str, str]) -> None:
        """Send status and headers."""
        self.started = True
        headers = {"content-type": content_type, "x-request-id": self.request_id, **extra}
        pairs = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the body; waits while the client reads slower than we write."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, data: bytes, content_type: str, extra: dict[str, str] | None = None) -> None:
        """Send a whole response."""
        length = {"content-length": str(len(data))}
        await self.start(status, content_type, length | (extra or {}))
        await self.write(data, more=False)

    async def json(self, value: Any, status: int = 200, **extra: str) -> None:
        """Send a whole JSON response; extra headers spell `-` as `_`."""
        headers = {name.replace("_", "-"): text for name, text in extra.items()}
        await self.reply(status, msgspec.json.encode(value), "application/json", headers)

    async def fail(self, error: RequestError) -> None:
        """Answer with OpenAI's error envelope, or as an SSE event once the 200 has gone out."""
        if self.started:
            await self.write(b"data: " + msgspec.json.encode(envelope(error)) + b"\n\n", more=False)
        elif isinstance(error, Overloaded):
            wait = str(error.retry_after)
            await self.json(envelope(error), error.status, retry_after=wait)
        else:
            await self.json(envelope(error), error.status)


async def while_connected(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, unless the client leaves first: then it is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(exchange.disconnected())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


def envelope(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def safe_id(text: str) -> str | None:
    """A caller's request id, if it is short and harmless in headers and logs."""
    return text if _SAFE_ID.fullmatch(text) else None
