"""Where a generated answer goes: a stream of events, or one JSON body. Both are fed the same Pieces."""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from serving.dialect import Reply
from serving.errors import GatewayError, Header, UpstreamFailed
from serving.exchange import Exchange
from serving.metering import Billed, Counts, Usage, billed
from serving.port import GatewaySettings, Outcome
from serving.request import Request
from serving.stream import BROKEN, Outbox, Piece, merged_logprobs
from serving.upstream import parse_choices

DONE = b"data: [DONE]\n\n"
EVENT_STREAM: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]
_ROLE = b'[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'


class Answer(Protocol):
    """What the pipeline feeds. Sets `request.started` once a part of the answer may be with the client."""

    def add(self, pieces: list[Piece]) -> None:
        """Take the next pieces; raises SlowReader when the client lags too far behind."""

    def reset(self) -> None:
        """Another attempt begins: forget what was added (nothing of it was sent)."""

    async def finish(self, usage: Billed) -> None:
        """Hand over the rest; returns, and stamps `delivered`, when the last byte is with the transport."""

    async def fail(self, error: GatewayError) -> None:
        """Tell the client in whatever way is left."""

    def abandon(self) -> None:
        """Send nothing more."""


def usage_json(usage: Billed) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between OpenAI's two answers of text."""

    chat: bool
    id_prefix: str
    object: str
    chunk_object: str

    def answer(self, exchange: Exchange, request: Request, settings: GatewaySettings) -> Answer:
        """A stream or one body, as asked."""
        assert request.ask is not None
        if request.ask.stream:
            return StreamAnswer(exchange, request, self, settings.unsent_bytes_limit)
        return WholeAnswer(exchange, request, self)

    def whole(self, body: bytes, request: Request) -> Reply:
        """An answer that the engine gave in one piece: its choices as they are, under our own id and model."""
        told = _wholes.decode(body)
        choices = parse_choices(told.choices)
        if not choices or any(choice.finish_reason in BROKEN for choice in choices):
            raise UpstreamFailed("The engine gave up on this request.")
        counts = Counts(relayed=sum(bool(choice.message) or bool(choice.text) for choice in choices))
        if told.usage is not None:
            counts.take(told.usage, told.usage.completion_tokens or 0)
        head = _opening(request, self, self.object)
        tail = msgspec.json.encode(usage_json(billed(Outcome.OK, counts, delivered=True)))
        return Reply(
            usage=told.usage,
            body=b"".join((head, told.choices, b',"usage":', tail, b"}")),
            finish_reason=choices[0].finish_reason or "",
            heard=counts.relayed,
        )


class _Whole(msgspec.Struct):
    choices: msgspec.Raw
    usage: Usage | None = None


_wholes = msgspec.json.Decoder(_Whole)


class StreamAnswer:
    """Server-sent events. The head goes out with the first text, so that a failure before it still has a status."""

    def __init__(self, exchange: Exchange, request: Request, shape: Shape, unsent_limit: int) -> None:
        assert request.ask is not None and request.route is not None
        self._exchange = exchange
        self._request = request
        self._include_usage = request.ask.include_usage
        self._chat = shape.chat
        self._head = _opening(request, shape, shape.chunk_object, prefix=b"data: ")
        self._tail = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
        self._introduced: set[int] = set()
        self._outbox = Outbox(self._write, unsent_limit)

    def add(self, pieces: list[Piece]) -> None:
        self._request.started = True
        head, tail = self._head, self._tail
        parts: list[bytes] = []
        for piece in pieces:
            if self._chat and piece.choice.index not in self._introduced:
                self._introduce(piece, parts)
            parts += (head, piece.raw, tail)
        self._outbox.put(b"".join(parts))

    def reset(self) -> None:
        """Nothing to forget: an attempt that added anything is never tried again."""

    async def finish(self, usage: Billed) -> None:
        if self._include_usage:
            told = msgspec.json.encode(usage_json(usage))
            await self._outbox.close(b"".join((self._head, b'[],"usage":', told, b"}\n\n", DONE)))
        else:
            await self._outbox.close(DONE)

    async def fail(self, error: GatewayError) -> None:
        if not self._request.started:
            await self._exchange.refuse(error)
            return
        await self._outbox.close(error.event())

    def abandon(self) -> None:
        self._outbox.abandon()

    def _introduce(self, piece: Piece, parts: list[bytes]) -> None:
        """The first delta of a choice carries its role, whatever the engine does."""
        self._introduced.add(piece.choice.index)
        delta = piece.choice.delta
        if delta is None or delta.role is None:
            parts += (self._head, _ROLE % piece.choice.index, self._tail)

    async def _write(self, data: bytes, more: bool) -> None:
        if not self._exchange.responding:
            await self._exchange.start(200, EVENT_STREAM)
        await self._exchange.send({"type": "http.response.body", "body": data, "more_body": more})
        now = time.monotonic_ns()
        stamps = self._request.stamps
        stamps.first_sent = stamps.first_sent or now
        if not more:
            stamps.delivered = now  # before anybody else runs: servers report a finished exchange as a disconnect


class WholeAnswer:
    """One JSON body, put together from the stream of the engine."""

    def __init__(self, exchange: Exchange, request: Request, shape: Shape) -> None:
        self._exchange = exchange
        self._request = request
        self._shape = shape
        self._choices: dict[int, Collected] = {}

    def add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            collected = self._choices.get(piece.choice.index)
            if collected is None:
                collected = self._choices[piece.choice.index] = Collected()
            collected.add(piece)

    def reset(self) -> None:
        self._choices.clear()

    async def finish(self, usage: Billed) -> None:
        body = b"".join(
            (
                _opening(self._request, self._shape, self._shape.object),
                msgspec.json.encode(self._told()),
                b',"usage":',
                msgspec.json.encode(usage_json(usage)),
                b"}",
            )
        )
        self._request.started = True
        await self._exchange.deliver(body)
        self._request.stamps.delivered = time.monotonic_ns()

    async def fail(self, error: GatewayError) -> None:
        if not self._exchange.responding:
            await self._exchange.refuse(error)

    def abandon(self) -> None:
        """Nothing is on its way."""

    def _told(self) -> list[dict[str, Any]]:
        chat = self._shape.chat
        return [
            {
                "index": index,
                **(collected.message() if chat else collected.text()),
                "logprobs": collected.logprobs,
                "finish_reason": collected.finish_reason,
            }
            for index, collected in sorted(self._choices.items())
        ]


class Collected:
    """One choice, growing."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.logprobs: dict[str, Any] | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def add(self, piece: Piece) -> None:
        choice = piece.choice
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.logprobs = merged_logprobs(self.logprobs, choice.logprobs)
        if choice.text:
            self._content.append(choice.text)
        delta = choice.delta
        if delta is None:
            return
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning_content or delta.reasoning:
            self._reasoning.append(delta.reasoning_content or delta.reasoning or "")
        if delta.refusal:
            self._refusal.append(delta.refusal)
        for position, call in enumerate(delta.tool_calls or ()):
            self._extend(call.get("index", position), call)

    def text(self) -> dict[str, Any]:
        return {"text": "".join(self._content)}

    def message(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._tool_calls else None,
            "refusal": "".join(self._refusal) or None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._tool_calls:
            message["tool_calls"] = [call for _, call in sorted(self._tool_calls.items())]
        return {"message": message}

    def _extend(self, index: int, part: dict[str, Any]) -> None:
        """A tool call comes in parts: names once, arguments bit by bit."""
        call = self._tool_calls.setdefault(
            index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _opening(request: Request, shape: Shape, object_name: str, prefix: bytes = b"") -> bytes:
    """Everything before the value of `choices`, the same in every chunk."""
    assert request.route is not None
    head = {
        "id": shape.id_prefix + request.id,
        "object": object_name,
        "created": int(request.arrival.started_at),
        "model": request.route.name,
    }
    return prefix + msgspec.json.encode(head)[:-1] + b',"choices":'
