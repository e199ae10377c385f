"""A chat answer told in another API's words: as named events, or as one body.

A Narrator knows the words and nothing of HTTP; the two answers here know HTTP and nothing of the words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from serving.answer import EVENT_STREAM, Answer
from serving.errors import GatewayError
from serving.exchange import Exchange
from serving.metering import Billed
from serving.port import GatewaySettings
from serving.request import Request
from serving.stream import Outbox, Piece
from serving.translate.parts import Change, Parts

Event = dict[str, Any]  # its `type` is also the event's name


class Narrator(Protocol):
    """One answer in the words of one API."""

    def begin(self, usage: Billed) -> Iterable[Event]:
        """Before the first part; `usage` is what is counted so far."""

    def tell(self, change: Change) -> Iterable[Event]:
        """A part was opened, has grown or is complete."""

    def end(self, parts: Parts, usage: Billed) -> Iterable[Event]:
        """After the last part."""

    def fail(self, error: GatewayError) -> Iterable[Event]:
        """Instead of the rest, once something has been told."""

    def body(self, parts: Parts, usage: Billed) -> dict[str, Any]:
        """All of it at once."""


def narrated(make: Callable[[Request], Narrator]) -> Callable[[Exchange, Request, GatewaySettings], Answer]:
    """What a Dialect needs: a stream or one body, as asked."""

    def answer(exchange: Exchange, request: Request, settings: GatewaySettings) -> Answer:
        assert request.ask is not None
        if request.ask.stream:
            return NarratedStream(exchange, request, make(request), settings.unsent_bytes_limit)
        return NarratedWhole(exchange, request, make(request))

    return answer


class NarratedStream:
    """Named events. As with chat, the head goes out with the first of them, so that earlier failures have a status."""

    def __init__(self, exchange: Exchange, request: Request, narrator: Narrator, unsent_limit: int) -> None:
        self._exchange = exchange
        self._request = request
        self._narrator = narrator
        self._parts = Parts(request.id)
        self._outbox = Outbox(self._write, unsent_limit)

    def add(self, pieces: list[Piece]) -> None:
        events = self._begun()
        for piece in pieces:
            for change in self._parts.take(piece):
                events += self._narrator.tell(change)
        if events:
            self._outbox.put(_written(events))

    def reset(self) -> None:
        """Nothing to forget: an attempt that added anything is never tried again."""

    async def finish(self, usage: Billed) -> None:
        events = self._begun()
        for change in self._parts.end():
            events += self._narrator.tell(change)
        events += self._narrator.end(self._parts, usage)
        await self._outbox.close(_written(events))

    async def fail(self, error: GatewayError) -> None:
        if not self._request.started:
            await self._exchange.refuse(error)
            return
        await self._outbox.close(_written(self._narrator.fail(error)))

    def abandon(self) -> None:
        self._outbox.abandon()

    def _begun(self) -> list[Event]:
        if self._request.started:
            return []
        self._request.started = True
        counts = self._request.counts
        return [*self._narrator.begin(Billed(counts.prompt, counts.cached, counts.generated, counts.reasoning))]

    async def _write(self, data: bytes, more: bool) -> None:
        if not self._exchange.responding:
            await self._exchange.start(200, EVENT_STREAM)
        await self._exchange.send({"type": "http.response.body", "body": data, "more_body": more})
        now = time.monotonic_ns()
        stamps = self._request.stamps
        stamps.first_sent = stamps.first_sent or now
        if not more:
            stamps.delivered = now  # before anybody else runs: servers report a finished exchange as a disconnect


class NarratedWhole:
    """One JSON body."""

    def __init__(self, exchange: Exchange, request: Request, narrator: Narrator) -> None:
        self._exchange = exchange
        self._request = request
        self._narrator = narrator
        self._parts = Parts(request.id)

    def add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._parts.take(piece)

    def reset(self) -> None:
        self._parts = Parts(self._request.id)

    async def finish(self, usage: Billed) -> None:
        body = msgspec.json.encode(self._narrator.body(self._parts, usage))
        self._request.started = True
        await self._exchange.deliver(body)
        self._request.stamps.delivered = time.monotonic_ns()

    async def fail(self, error: GatewayError) -> None:
        if not self._exchange.responding:
            await self._exchange.refuse(error)

    def abandon(self) -> None:
        """Nothing is on its way."""


def _written(events: Iterable[Event]) -> bytes:
    written = bytearray()
    for event in events:
        written += b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
    return bytes(written)
