"""The web process's server: uvicorn, except that a signal first lets running requests finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

log = logging.getLogger(__name__)

Drain = Callable[[], Awaitable[None]]


class DrainingServer(uvicorn.Server):
    """Listens on while `drain` runs, so that new requests hear why they are refused and /readyz says 503.

    uvicorn itself would close its sockets at the signal, hang up on every WebSocket (a playground answer with it), and
    tell the application only when all requests are over. A second signal ends at once; the shipper then settles what
    was cut. With a socket that other processes share it stops to accept at the signal: they take what comes.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, *, shares_socket: bool = False) -> None:
        super().__init__(config)
        self._drain = drain
        self._shares_socket = shares_socket
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._asked = False

    async def main_loop(self) -> None:
        """Serve until drained."""
        self._loop = asyncio.get_running_loop()
        if self._asked:  # by a signal while starting
            self._begin()
        await super().main_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end now."""
        self._captured_signals.append(sig)
        if self._asked:
            self.force_exit = self.should_exit = True
            return
        self._asked = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._draining = asyncio.create_task(self._end_drained(), name="drain")

    async def _end_drained(self) -> None:
        if self._shares_socket:
            for server in self.servers:  # others accept what comes from here on
                server.close()
        try:
            await self._drain()
        except Exception:
            log.exception("web: running requests could not be drained")
        finally:
            self.should_exit = True
