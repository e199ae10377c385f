"""One HTTP exchange over ASGI: read the request, write the response, notice when the client goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from serving import apikey, eager
from serving.errors import (
    ClientLeft,
    GatewayError,
    Header,
    RequestTimeout,
    SlowReader,
    TooLarge,
    UnsupportedMedia,
)
from serving.port import Receive, Scope, Send
from serving.request import Arrival
from serving.routing import Hints
from serving.stream import FLUSH_TIMEOUT_S
from serving.telemetry import names, tracing

JSON: Header = (b"content-type", b"application/json")
BODY_TIMEOUT_S = 60.0
_MAX_CLIENT_ID = 64


class Exchange:
    """Knows HTTP and nothing of what is asked."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.client: str | None = scope["client"][0] if scope.get("client") else None
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.envelope = GatewayError.envelope  # of the API spoken here; its dialect may have another
        trace = tracing.continued(self.header(names.TRACEPARENT))
        self.arrival = Arrival(trace, _printable(self.header(names.REQUEST_ID) or ""))
        self.responding = False
        self.extra: list[Header] = []  # what else every response to this request carries

    def header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def hints(self) -> Hints:
        """What the caller wishes of routing."""
        retry = self.header(names.RETRY_COUNT) or ""
        return Hints(
            policy=self._hint(names.POLICY),
            target=self._hint(names.TARGET),
            replica=self._hint(names.REPLICA),
            session=self._hint(names.SESSION),
            retry=min(int(retry), 100) if retry.isdecimal() and len(retry) < 4 else 0,
        )

    def _hint(self, name: bytes) -> str:
        value = self._headers.get(name)
        return _printable(value.decode("latin-1")) if value else ""

    async def body(self, limit: int) -> bytes:
        """The whole JSON body; refuses another type, too many bytes, and a client that stops half-way."""
        kind = (self.header(b"content-type") or "application/json").partition(";")[0].strip()
        if kind.lower() != "application/json":
            raise UnsupportedMedia("Send the body as application/json.")
        declared = self.header(b"content-length") or ""
        if declared.isdecimal() and int(declared) > limit:
            raise TooLarge(limit)
        over, body, rest = eager.begin(self._read(limit))
        if over:
            assert body is not None
            return body
        assert rest is not None
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await rest
        except TimeoutError:
            raise RequestTimeout("The body did not arrive in time.") from None

    async def gone(self) -> None:
        """Return when the client has left. Call it once the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Write the head of a response."""
        self.responding = True
        message = {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, *self.extra, *self._common()],
        }
        await self.send(message)

    async def respond(self, status: int, body: bytes, headers: Iterable[Header] = (JSON,)) -> None:
        """Write a whole response."""
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, [*headers, length])
        await self.send({"type": "http.response.body", "body": body})

    async def deliver(self, body: bytes) -> None:
        """Write a whole answer; raises SlowReader where the client does not take it."""
        over, _, rest = eager.begin(self.respond(200, body))
        if over:
            return
        assert rest is not None
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await rest
        except TimeoutError:
            raise SlowReader("The client did not read its answer.") from None

    async def respond_json(self, status: int, value: Any) -> None:
        await self.respond(status, msgspec.json.encode(value))

    async def refuse(self, error: GatewayError) -> None:
        """Answer with an error, in the envelope of OpenAI's API."""
        await self.respond(error.status, self.envelope(error), [JSON, *error.headers])

    async def _read(self, limit: int) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            if len(body) > limit:
                raise TooLarge(limit)
            if not message.get("more_body"):
                return bytes(body)

    def _common(self) -> list[Header]:
        took_ms = (time.monotonic_ns() - self.arrival.received) // 1_000_000
        return [
            (names.REQUEST_ID, self.arrival.id.encode()),
            (names.TRACEPARENT, self.arrival.trace.header().encode()),
            (b"openai-processing-ms", b"%d" % took_ms),
            (b"openai-version", names.OPENAI_VERSION),
        ]


def _printable(value: str) -> str:
    return apikey.hidden("".join(c for c in value if c.isascii() and c.isprintable()))[:_MAX_CLIENT_ID]
