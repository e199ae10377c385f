"""POST /v1/chat/completions and /v1/completions: the answer as one body or as events."""

from __future__ import annotations

from typing import Any

from engine.errors import UnknownModel
from engine.outbox import Delta
from engine.server.generation import Generation
from engine.server.http import Exchange, while_connected
from engine.server.reader import ChoiceReader
from engine.server.schema import CompletionRequest, parse
from engine.server.service import Service
from engine.server.wire import DONE, Shape, event
from engine.types import FinishReason


async def answer(service: Service, exchange: Exchange, *, chat: bool) -> None:
    """Serve one request; a client that leaves aborts it, streaming or not."""
    data = await exchange.body()
    request = parse(data, chat=chat)
    if request.model != service.config.name:
        raise UnknownModel(f"The model '{request.model}' does not exist.", "model")
    exchange.request_id = request.fields.get("request_id", exchange.request_id)
    generation = Generation(service, request)
    reply = Answer(service, exchange, generation)
    try:
        await while_connected(exchange, reply.run())
    finally:
        generation.settle()


class Answer:
    """Writes one generation to one exchange."""

    def __init__(self, service: Service, exchange: Exchange, generation: Generation) -> None:
        self._exchange = exchange
        self._generation = generation
        self._request: CompletionRequest = generation.request
        self._wants_timeline = exchange.header("x-fanlight-timeline") == "1"
        self._shape = Shape(exchange.request_id, service.config.name, service.tokenizer, chat=self._request.chat)
        self._readers = [ChoiceReader(self._request.tool_use) for _ in range(self._request.choices)]
        self._seen: set[int] = set()
        self._reported_first = False

    async def run(self) -> None:
        """Submit and answer."""
        await self._generation.submit()
        await (self._stream() if self._request.stream else self._whole())

    async def _whole(self) -> None:
        generation = self._generation
        totals = [Delta() for _ in generation.choices]
        while not generation.done:
            for index, delta in await generation.outbox.take():
                totals[index].merge(delta)
                self._note(delta)
        answers = [reader.read(delta) for reader, delta in zip(self._readers, totals, strict=True)]
        body = self._shape.body(answers, generation.usage())
        if self._wants_timeline:
            body["fanlight"] = generation.report()
        await self._exchange.json(body)

    async def _stream(self) -> None:
        """Send events. Headers wait for the first token, so that earlier faults get a status."""
        generation, write = self._generation, self._exchange.write
        while not generation.done:
            ready = await generation.outbox.take()
            await self._start()
            for index, delta in ready:
                chunks = self._chunks(index, delta)
                if chunks:
                    await write(b"".join(map(event, chunks)))
                self._note(delta)
        await write(self._last(), more=False)

    async def _start(self) -> None:
        if self._exchange.started or self._generation.outbox.generated == 0:
            return
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self._generation.timeline.note("STREAM_START")
        await self._exchange.start(200, "text/event-stream; charset=utf-8", headers)

    def _note(self, delta: Delta) -> None:
        if delta.finish is not None:
            self._generation.ended(delta.finish, delta.error)
        self._generation.follow_first()

    def _chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunks one delta becomes: role, text, end; a failed end becomes none."""
        if delta.finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
            return []
        chunks = []
        if self._request.chat and index not in self._seen:
            chunks.append(self._shape.role_chunk(index))
        self._seen.add(index)
        said = self._readers[index].read(delta)
        if said or (self._request.continuous_usage and delta.tokens):
            chunks.append(self._first_report(self._shape.text_chunk(index, said)))
        if said.reason is not None:
            chunks.append(self._shape.finish_chunk(index, said.reason))
        return [self._with_usage(chunk) for chunk in chunks]

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        usage = self._generation.usage()
        if self._request.continuous_usage:
            chunk["usage"] = usage.as_dict()
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _first_report(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._wants_timeline and not self._reported_first:
            self._reported_first = True
            chunk["fanlight"] = self._generation.report()
        return chunk

    def _last(self) -> bytes:
        """The usage chunk, where asked for, and [DONE]."""
        if not self._request.include_usage:
            return DONE
        chunk = self._shape.usage_chunk(self._generation.usage())
        if self._wants_timeline:
            chunk["fanlight"] = self._generation.report()
        return event(chunk) + DONE
