"""Who asks, whichever way it came: over HTTP, or from inside the process."""

from __future__ import annotations

from typing import Protocol

from serving.answer import Answer
from serving.dialect import Dialect
from serving.errors import GatewayError
from serving.request import Request
from serving.routing import Hints


class Caller(Protocol):
    """Who asks, and where the answer goes."""

    dialect: Dialect

    async def body(self) -> bytes:
        """The JSON asked with."""

    def answer(self, request: Request) -> Answer:
        """Where to put the answer of an admitted request."""

    async def refuse(self, error: GatewayError) -> None:
        """Tell it no, before there is an Answer."""

    def hints(self) -> Hints:
        """What it wishes of routing, whether or not it may have it."""

    async def gone(self) -> None:
        """Return when it has left."""
