"""An HTTP client as the pipeline sees it."""

from __future__ import annotations

from serving.answer import Answer
from serving.dialect import Dialect
from serving.errors import GatewayError
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

    async def gone(self) -> None:
        await self._exchange.gone()
