"""Who asks, whichever way it came: over HTTP, or from inside the process."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from serving.answer import Answer
from serving.coordination.contract import Place
from serving.dialect import Dialect
from serving.errors import GatewayError, Header
from serving.request import Request
from serving.routing import Hints


class Caller(Protocol):
    """Who asks, and where the answer goes."""

    dialect: Dialect

    async def body(self) -> bytes:
        """The JSON asked with."""

    def answer(self, request: Request) -> Answer:
        """Where to put the answer of an admitted request."""

    def announce(self, headers: list[Header]) -> None:
        """What every response to it carries from here on."""

    def queued(self, place: Place) -> None:
        """It waits for a replica, there in the queue."""

    def starting(self, eta_s: float) -> None:
        """It waits for a deployment that is being started, for so many seconds more, as far as is known."""

    async def deliver(self, body: bytes, request: Request) -> None:
        """An answer in one piece; stamps `delivered`."""

    async def refuse(self, error: GatewayError) -> None:
        """Tell it no, before there is an Answer."""

    def hints(self) -> Hints:
        """What it wishes of routing, whether or not it may have it."""

    def gone(self) -> Coroutine[Any, Any, None]:
        """Return when it has left."""
