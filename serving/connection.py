"""One connection to an engine: HTTP/1.1 with keep-alive, one request at a time, pushed to its reader as it comes.

Bytes are parsed by httptools (llhttp) and handed on in the callback that received them: between the engine's write and
the client's there is no task to wake and no buffer to wait in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

MAX_HEAD_BYTES = 64 * 1024


class Reader(Protocol):
    """Who sent the request. After `ended` or `lost` nothing more comes."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The status line and headers, names in lower case."""

    def body(self, data: bytes) -> None:
        """The next bytes of the body."""

    def ended(self) -> None:
        """The response is complete."""

    def lost(self, error: Exception | None) -> None:
        """The connection ended, or what came is not HTTP, before the response was complete."""


class Connection(asyncio.Protocol):
    """Made by a Channel, which gets it back through `released` after a whole response that keeps it alive."""

    def __init__(self, released: Callable[[Connection], None], dropped: Callable[[Connection], None]) -> None:
        self._released = released
        self._dropped = dropped
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Reader | None = None
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self.complete = True
        self.opened_at = time.monotonic()
        self.idle_since = 0.0

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, request: bytes, reader: Reader) -> None:
        """Write a request whose response goes to `reader`."""
        assert self._transport is not None
        self._reader = reader
        self.complete = False
        self._headers = {}
        self._head_bytes = 0
        self._transport.write(request)

    def serves(self, reader: Reader) -> bool:
        """Whether it is still at this reader's request: once that is complete, the next one may have it already."""
        return self._reader is reader

    def forget_reader(self) -> None:
        """Its reader has all it wants: the rest of the response is read away, so that the connection can go on."""
        self._reader = None

    def abort(self) -> None:
        """Close at once, without a word to the reader: for an engine that is the order to stop."""
        self._reader = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        if self.complete:  # nothing was asked: it has lost step with us
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # an error that the reader raised in a callback comes wrapped in one of the parser's
            self._lose(error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._dropped(self)
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        reader, self._reader = self._reader, None
        if reader is None or self.complete:
            return
        self.complete = True
        until_the_end = self._headers and not {b"content-length", b"transfer-encoding"} & self._headers.keys()
        if until_the_end and error is None:
            reader.ended()  # such a body ends with its connection
        else:
            reader.lost(error)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the engine's headers are too long")
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._reader is not None:
            self._reader.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.body(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._headers = {}
            return
        self.complete = True
        reader, self._reader = self._reader, None
        if self._parser.should_keep_alive() and not self.closing:
            self.idle_since = time.monotonic()
            self._released(self)
        elif self._transport is not None:
            self._transport.close()
        if reader is not None:
            reader.ended()
