"""The overview's socket: sends snapshots, takes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import parse_qs

from channels.generic.websocket import AsyncWebsocketConsumer

from console.base.sockets import SIGNED_OUT, off_loop, person_of
from console.dashboards.feed import View, Watcher, hub
from console.telemetry import windows
from console.telemetry.scope import Scope, scope_of

_CHECK_S = 20.0


class OverviewConsumer(AsyncWebsocketConsumer):
    """?range=1h&language=en&zone=UTC. Closes with 4401 once the person is signed out."""

    async def connect(self) -> None:
        self.watcher: Watcher | None = None
        self.tasks: list[asyncio.Task[None]] = []
        allowed = await off_loop(_scope, self.scope)
        await self.accept()
        if allowed is None:
            await self.close(SIGNED_OUT)
            return
        asked = parse_qs(self.scope["query_string"].decode("latin-1"))
        key = asked.get("range", [""])[0]
        self.key = key if key in windows.RANGES else windows.DEFAULT
        self.of = allowed
        view = View(asked.get("language", ["en"])[0][:12], asked.get("zone", ["UTC"])[0][:64])
        self.watcher = hub.watch(self.of, self.key, view)
        self.tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._check())]

    async def disconnect(self, code: int) -> None:
        for task in self.tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self.watcher is not None:
            hub.leave(self.of, self.key, self.watcher)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Nothing is expected."""

    async def _send(self) -> None:
        assert self.watcher is not None
        while True:
            await self.send(text_data=await self.watcher.get())
            await asyncio.sleep(0.5)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            if await off_loop(_scope, self.scope) != self.of:
                await self.close(SIGNED_OUT)
                return


def _scope(scope: Any) -> Scope | None:
    person = person_of(scope)
    return scope_of(person) if person else None
