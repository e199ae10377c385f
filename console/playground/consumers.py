"""The playground's socket. Every message is a real request through the gateway's own pipeline; tokens go straight from
it to this socket, never through the channel layer.

in    {"type": "send", "column": 0, "model": …, "messages": […], "params": {…}}    {"type": "stop", "column": 0}
out   {"type": "starting" | "queued" | "started" | "delta" | "done" | "stopped" | "error", "column": 0, …}
      at most 30 a second and column
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from channels.generic.websocket import AsyncWebsocketConsumer
from django.utils import translation
from django.utils.translation import gettext as _

from console import contract
from console.base.sockets import SIGNED_OUT, off_loop, person_of
from console.errors import NotAllowed
from serving.port import Delta, Principal

FRAME_S = 1 / 30
COLUMNS = 4
PARAMS = {
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "frequency_penalty", "presence_penalty",
}  # fmt: skip
_PATIENCE_S = 8.0


class SignedOut(Exception):
    """The session behind the socket is over."""


class BadMessage(ValueError):
    """The page sent something that cannot be used."""


class PlaygroundConsumer(AsyncWebsocketConsumer):
    """?tenant=<id>&language=en. One running answer a column; closing the socket cancels them all."""

    async def connect(self) -> None:
        self.running: dict[int, asyncio.Task[None]] = {}
        asked = parse_qs(self.scope["query_string"].decode("latin-1"))
        self.tenant = asked.get("tenant", [""])[0]
        self.language = asked.get("language", ["en"])[0][:12]
        await self.accept()
        try:
            await self._principal()
        except SignedOut:
            await self.close(SIGNED_OUT)
        except (NotAllowed, TimeoutError) as error:
            await self._tell("error", 0, message=str(error), code="", status=0, fatal=True)
            await self.close()

    async def disconnect(self, code: int) -> None:
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        try:
            message = _read(text_data)
        except BadMessage as error:
            await self._tell("error", 0, message=str(error), code="invalid_message", status=400)
            return
        column = message["column"]
        if message["type"] == "stop":
            await self._stop(column)
        else:
            await self._stop(column)
            self.running[column] = asyncio.create_task(self._answer(column, _body(message)))

    async def _stop(self, column: int) -> None:
        task = self.running.pop(column, None)
        if task is not None and not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _answer(self, column: int, body: dict[str, Any]) -> None:
        try:
            principal = await self._principal()
            inference = contract.inference()
        except SignedOut:
            await self.close(SIGNED_OUT)
            return
        except (NotAllowed, contract.NotServing, TimeoutError) as error:
            await self._tell("error", column, message=str(error), code="", status=0)
            return
        frames = Frames()
        sender = asyncio.create_task(self._send_frames(column, frames))
        answer = inference.chat(principal, body)
        try:
            async for delta in answer:
                frames.add(delta)
        except asyncio.CancelledError:
            frames.stop()
            raise
        finally:
            # Closing is what "the client left" means to the pipeline: the engine is aborted and the request settled.
            await asyncio.shield(_close(answer))
            frames.end()
            with contextlib.suppress(asyncio.CancelledError):
                await sender

    async def _send_frames(self, column: int, frames: Frames) -> None:
        while True:
            frame = await frames.next()
            if frame is None:
                return
            await self._tell(frame.pop("type"), column, **frame)
            await asyncio.sleep(FRAME_S)

    async def _principal(self) -> Principal:
        """Ask again before every request: people sign out, lose their tenant, are switched off."""
        try:
            return await asyncio.wait_for(off_loop(_authorise, self.scope, self.tenant, self.language), _PATIENCE_S)
        except TimeoutError:
            with translation.override(self.language):
                raise TimeoutError(_("The console's database does not answer. Requests to /v1 go on.")) from None

    async def _tell(self, kind: str, column: int, **values: Any) -> None:
        with contextlib.suppress(Exception):  # whoever left cannot be told, and servers say that in different ways
            await self.send(text_data=msgspec.json.encode({"type": kind, "column": column, **values}).decode())


class Frames:
    """Collects deltas until the next frame may go out: text adds up, figures are the newest."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []
        self._ready = asyncio.Event()
        self._ended = False

    def add(self, delta: Delta) -> None:
        frame = {"type": delta.kind, **msgspec.to_builtins(delta)}
        del frame["kind"]
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last["type"] == frame["type"] == "delta":
            frame["text"] = last["text"] + frame["text"]
            self._waiting[-1] = frame
        else:
            self._waiting.append(frame)
        self._ready.set()

    def stop(self) -> None:
        self._waiting.append({"type": "stopped"})
        self._ready.set()

    def end(self) -> None:
        self._ended = True
        self._ready.set()

    async def next(self) -> dict[str, Any] | None:
        while not self._waiting:
            if self._ended:
                return None
            self._ready.clear()
            await self._ready.wait()
        return self._waiting.pop(0)


async def _close(answer: Any) -> None:
    close = getattr(answer, "aclose", None)
    if close is not None:
        await close()


def _authorise(scope: Any, tenant: str, language: str) -> Principal:
    with translation.override(language):
        person = person_of(scope)
        if person is None:
            raise SignedOut
        try:
            return contract.playground_principal(person, tenant)
        except ValueError as error:  # not a UUID
            raise NotAllowed(_("There is no such tenant.")) from error


def _read(text: str | None) -> dict[str, Any]:
    try:
        message = json.loads(text or "")
    except ValueError:
        raise BadMessage("Messages are JSON.") from None
    if not isinstance(message, dict) or message.get("type") not in {"send", "stop"}:
        raise BadMessage("A message has the type send or stop.")
    column = message.get("column")
    if not isinstance(column, int) or isinstance(column, bool) or not 0 <= column < COLUMNS:
        raise BadMessage(f"A column is a number from 0 to {COLUMNS - 1}.")
    return message


def _body(message: Mapping[str, Any]) -> dict[str, Any]:
    """The request as /v1/chat/completions would get it; what is wrong in it is told by the pipeline itself."""
    params = message.get("params")
    known = (
        {k: v for k, v in params.items() if k in PARAMS and v not in (None, "", [])} if isinstance(params, dict) else {}
    )
    return {
        "model": message.get("model"),
        "messages": message.get("messages"),
        "stream": True,
        **known,
    }
