"""port.Inference: the same pipeline for a caller inside the process, such as the playground's socket."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from serving.answer import Answer
from serving.coordination.contract import Place
from serving.dialect import Dialect
from serving.endpoints.chat import CHAT
from serving.errors import ClientLeft, GatewayError, Header, SlowReader, TooLarge
from serving.metering import Billed
from serving.pipeline import Pipeline
from serving.port import Delta, GatewaySettings, Principal
from serving.request import Arrival, Request
from serving.routing import NO_HINTS, Hints
from serving.stream import Piece
from serving.telemetry import tracing

_END = None


class Playground:
    """Runs chats and yields their Deltas; closing the iterator is a client that left."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def chat(self, principal: Principal, body: Mapping[str, Any]) -> AsyncIterator[Delta]:
        """See port.Inference. Errors are Deltas too: nothing is raised."""
        arrival = Arrival(tracing.continued(None))
        snapshot = self._pipeline.configuration.peek()
        request = Request(arrival, principal, CHAT.name, snapshot)
        request.stamps.authenticated = time.monotonic_ns()
        caller = InsideCaller(request, body, self._pipeline.settings)
        task = asyncio.create_task(self._pipeline.serve(request, caller))
        task.add_done_callback(lambda _: caller.end())
        try:
            while (delta := await caller.next()) is not _END:
                yield delta
        finally:
            request.cut(ClientLeft())
            await asyncio.shield(asyncio.gather(task, return_exceptions=True))


class InsideCaller:
    """Caller and Answer in one: what the pipeline adds, the iterator takes."""

    dialect: Dialect = CHAT

    def __init__(self, request: Request, body: Mapping[str, Any], settings: GatewaySettings) -> None:
        self._request = request
        self._body = body
        self._limit = settings.unsent_bytes_limit
        self._body_limit = settings.max_body_bytes
        self._unsent = 0
        self._told_eta_s = -1
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()

    async def next(self) -> Delta | None:
        delta = await self._deltas.get()
        if delta is not None:
            self._unsent -= len(delta.text)
        return delta

    def end(self) -> None:
        self._deltas.put_nowait(_END)

    # Caller

    async def body(self) -> bytes:
        body = msgspec.json.encode({**self._body, "stream": True})
        if len(body) > self._body_limit:
            raise TooLarge(self._body_limit)
        return body

    def answer(self, request: Request) -> Answer:
        self._deltas.put_nowait(self._delta("started"))
        return self

    def hints(self) -> Hints:
        return NO_HINTS

    def announce(self, headers: list[Header]) -> None:
        """Limits are shown on the console's own pages."""

    def queued(self, place: Place) -> None:
        self._deltas.put_nowait(self._delta("queued", position=place.position, depth=place.depth))

    def starting(self, eta_s: float) -> None:
        if math.ceil(eta_s) == self._told_eta_s:
            return
        self._told_eta_s = math.ceil(eta_s)
        self._deltas.put_nowait(self._delta("starting", eta_s=eta_s))

    async def deliver(self, body: bytes, request: Request) -> None:
        raise AssertionError("the playground always streams")

    async def refuse(self, error: GatewayError) -> None:
        await self.fail(error)

    async def gone(self) -> None:
        """Its leaving is noticed by the iterator, which cuts the request itself."""
        await asyncio.Event().wait()

    # Answer

    def add(self, pieces: list[Piece]) -> None:
        self._request.started = True
        text = "".join(p.choice.delta.content or "" for p in pieces if p.choice.delta is not None)
        if not text:
            return
        self._unsent += len(text)
        if self._unsent > self._limit:
            raise SlowReader("The client did not read its stream.")
        if not self._request.stamps.first_sent:
            self._request.stamps.first_sent = time.monotonic_ns()
        self._deltas.put_nowait(self._delta("delta", text=text))

    def reset(self) -> None:
        """Nothing was passed on yet."""

    async def finish(self, usage: Billed) -> None:
        reason = self._request.finish_reason
        self._deltas.put_nowait(self._delta("done", finish_reason=reason))
        self._request.stamps.delivered = time.monotonic_ns()

    async def fail(self, error: GatewayError) -> None:
        delta = self._delta("error", status=error.status, code=error.code, message=error.message)
        self._deltas.put_nowait(delta)

    def abandon(self) -> None:
        """What is queued may be read or not."""

    def _delta(self, kind: str, **facts: Any) -> Delta:
        request = self._request
        stamps, counts = request.stamps, request.counts
        ttft = stamps.first_sent - stamps.received if stamps.first_sent else None
        return Delta(
            kind=kind,
            request_id=request.id,
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            completion_tokens=counts.generated,
            ttft_ms=None if ttft is None else ttft / 1e6,
            elapsed_ms=(time.monotonic_ns() - stamps.received) / 1e6,
            replica=request.replica.name if request.replica else "",
            **facts,
        )
