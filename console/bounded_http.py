"""HTTP/1.1 as uvicorn reads it, within bounds: nobody, key or none, makes the process hold what never ends."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from console.one_write import OneWrite

MAX_HEAD_BYTES = 64 * 1024  # and what one read brings on top
HEAD_TIMEOUT_S = 30.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """Bounds what has no place in a body (the head, trailers, chunk extensions) and how long a head may take.

    Bodies are bounded by whoever reads them.
    """

    _beside_body = 0  # bytes since the last that were of use
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(cast("asyncio.Transport", OneWrite(transport, self.loop)))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._hang_up()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._beside_body = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_is_here(self) -> None:
        self._beside_body = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _hang_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LARGE)
        self.transport.close()
