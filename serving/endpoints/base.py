"""An HTTP client as the pipeline sees it."""

from __future__ import annotations

import time

from serving.answer import Answer
from serving.coordination.contract import Place
from serving.dialect import Dialect
from serving.errors import GatewayError, Header
from serving.exchange import Exchange
from serving.port import GatewaySettings
from serving.request import Request
from serving.routing import Hints


class HttpCaller:
    """Somebody at the other end of an Exchange, asking in a Dialect."""

    def __init__(self, exchange: Exchange, dialect: Dialect, settings: GatewaySettings) -> None:
        self.dialect = dialect
        self._exchange = exchange
        self._settings = settings

    async def body(self) -> bytes:
        return await self._exchange.body(self._settings.max_body_bytes)

    def answer(self, request: Request) -> Answer:
        return self.dialect.answer(self._exchange, request, self._settings)

    async def refuse(self, error: GatewayError) -> None:
        await self._exchange.refuse(error)

    def hints(self) -> Hints:
        return self._exchange.hints()

    def announce(self, headers: list[Header]) -> None:
        self._exchange.extra += headers

    def queued(self, place: Place) -> None:
        """HTTP has no way to tell before the answer begins; the console shows it."""

    def starting(self, eta_s: float) -> None:
        """Nor here."""

    async def deliver(self, body: bytes, request: Request) -> None:
        request.started = True
        await self._exchange.deliver(body)
        request.stamps.delivered = time.monotonic_ns()

    async def gone(self) -> None:
        await self._exchange.gone()
