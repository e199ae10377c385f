"""Where the answer of an engine that generates nothing goes."""

from __future__ import annotations

from serving.errors import GatewayError
from serving.exchange import Exchange
from serving.metering import Billed
from serving.port import GatewaySettings
from serving.request import Request
from serving.stream import Piece


class OnePiece:
    """The Answer where the engine's own is delivered in one piece: only failures are told by it."""

    def __init__(self, exchange: Exchange, _request: Request, _settings: GatewaySettings) -> None:
        self._exchange = exchange

    def add(self, pieces: list[Piece]) -> None:
        raise AssertionError("nothing is generated here, so there are no pieces")

    def reset(self) -> None:
        """Nothing was added."""

    async def finish(self, usage: Billed) -> None:
        raise AssertionError("the engine's answer is delivered instead")

    async def fail(self, error: GatewayError) -> None:
        if not self._exchange.responding:
            await self._exchange.refuse(error)

    def abandon(self) -> None:
        """Nothing is on its way."""
