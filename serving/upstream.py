"""The engine's side of a request: its answer, pushed as it comes and taken apart no further than is needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from serving.connection import Connection
from serving.errors import EngineBusy, EngineRefused, GatewayError, TransportFault, UpstreamFailed
from serving.metering import Usage

DONE = b"[DONE]"
MAX_EVENT_BYTES = 8 * 1024 * 1024
MAX_BODY_BYTES = 32 * 1024 * 1024  # of an answer in one piece: embeddings are long
_MAX_ERROR_BYTES = 64 * 1024
_MAX_WORD = 64
_PASSED_ON = frozenset((400, 408, 413, 422, 429))  # other 4xx mean that our own request was wrong


class Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None

    def says_something(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.tool_calls
            or self.reasoning
            or self.refusal
            or self.function_call
        )


class Choice(msgspec.Struct):
    """One choice: `delta` of a chat chunk, `message` of a chat answer in one piece, `text` of plain completions."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    message: msgspec.Raw = msgspec.Raw(b"")

    def says_something(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.says_something())


class Chunk(msgspec.Struct):
    """One event, parsed no deeper than is needed to count and to route it."""

    choices: msgspec.Raw = msgspec.Raw(b"[]")
    usage: Usage | None = None
    fanlight: msgspec.Raw = msgspec.Raw(b"")
    metrics: msgspec.Raw = msgspec.Raw(b"")  # vLLM's
    error: msgspec.Raw = msgspec.Raw(b"")


_chunks = msgspec.json.Decoder(Chunk)
parse_choices = msgspec.json.Decoder(list[Choice]).decode


def parse_chunk(payload: bytes) -> Chunk:
    """Read one event; raises what the engine reports in it, or UpstreamFailed where it is not a chunk."""
    try:
        chunk = _chunks.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        raise UpstreamFailed("The engine sent an event that is not a chunk.") from None
    if chunk.error and bytes(chunk.error) != b"null":
        raise _reported(bytes(chunk.error))
    return chunk


class EventParser:
    """Cuts a byte stream into the payloads of server-sent events, wherever the reads were split."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the events that `data` completes. Raises UpstreamFailed for one without an end."""
        buffer = self._rest + data if self._rest else data
        if b"\r" in buffer:  # JSON escapes it, so a bare one only ends lines
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise UpstreamFailed("The engine sent an event without an end.")
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            elif (payload := _payload(event)) is not None:
                payloads.append(payload)
        return payloads


def _payload(event: bytes) -> bytes | None:
    """The general form: several data lines, other fields, comments."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class EngineCall:
    """One request at an engine: what it answers is pushed to `take` as it comes; `done` resolves when it is over.

    With a `take`, the answer must be a stream of events and `done` gives None; without, it is one body and `done` gives
    that. Anything else is raised from `done`, errors of `take` too.
    """

    def __init__(
        self, connection: Connection, take: Callable[[list[bytes]], bool] | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._connection = connection
        self._take = take
        self._parser = EventParser()
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()
        self.done: asyncio.Future[bytes | None] = loop.create_future()

    def send(self, request: bytes) -> None:
        self._connection.send(request, self)

    def abort(self) -> None:
        """Close the connection, which is how an engine learns to stop; unless it is done and another's by now."""
        if self._connection.serves(self):
            self._connection.abort()

    # connection.Reader

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._headers = status, headers
        if status == 200 and self._take is not None and not _is_stream(headers):
            self._fail(UpstreamFailed("The engine did not answer with a stream."))

    def body(self, data: bytes) -> None:
        if self._status == 200 and self._take is not None:
            self._events(data)
            return
        self._body += data
        if len(self._body) > (MAX_BODY_BYTES if self._status == 200 else _MAX_ERROR_BYTES):
            if self._status == 200:
                self._fail(UpstreamFailed("The engine's answer is too long."))
            else:
                self.ended()
                self.abort()

    def ended(self) -> None:
        if self.done.done():
            return
        if self._status != 200:
            self.done.set_exception(refusal(self._status, self._headers, bytes(self._body)))
        elif self._take is not None:
            self.done.set_result(None)
        else:
            self.done.set_result(bytes(self._body))

    def lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if self._status not in (0, 200):  # it said why, if not all of it
            self.ended()
            return
        fault = TransportFault("The connection to the engine broke.")
        fault.__cause__ = error
        self.done.set_exception(fault)

    def _events(self, data: bytes) -> None:
        if self.done.done():
            return
        assert self._take is not None
        try:
            payloads = self._parser.feed(data)
            over = bool(payloads) and self._take(payloads)
        except Exception as error:  # noqa: BLE001 - raised from `done`
            self._fail(error)
            return
        if over and not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.abort()
        if not self.done.done():
            self.done.set_exception(error)


def _is_stream(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")


def refusal(status: int, headers: Mapping[bytes, bytes], body: bytes) -> GatewayError:
    """An answer other than 200, as an error of ours."""
    wait = _retry_after(headers.get(b"retry-after"))
    if status == 503:
        return EngineBusy("The engine has no room for this request now.", code="engine_overloaded", retry_after=wait)
    if status not in _PASSED_ON:
        failed = UpstreamFailed(f"The engine failed with status {status}.")
        failed.answered = status
        return failed
    refused = _refused(status, _fields(body))
    if status == 429:
        refused.headers.append((b"retry-after", b"%d" % wait))
    return refused


def _retry_after(value: bytes | None) -> int:
    return min(max(int(value), 1), 60) if value and value.isdigit() and len(value) < 9 else 1


class _ErrorFields(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def _fields(body: bytes) -> _ErrorFields:
    """The engine's words, whether enveloped as OpenAI does or bare as older engines do."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(body, type=_ErrorBody).error
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(body, type=_ErrorFields)
    return _ErrorFields()


def _refused(status: int, fields: _ErrorFields) -> EngineRefused:
    message = fields.message or "The engine refused this request."
    code = fields.code[:_MAX_WORD] if isinstance(fields.code, str) else _code(message)
    kind = fields.type[:_MAX_WORD] if fields.type else None
    return EngineRefused(status, message, type=kind, code=code, param=fields.param)


def _code(message: str) -> str | None:
    """vLLM puts the HTTP status where OpenAI has a code; the one that clients act on is told by its words."""
    return "context_length_exceeded" if "maximum context length" in message else None


def _reported(error: bytes) -> GatewayError:
    """An error event inside the stream: a refusal keeps its status, anything else is a failure."""
    try:
        fields = msgspec.json.decode(error, type=_ErrorFields)
    except (msgspec.DecodeError, RecursionError):
        return UpstreamFailed("The engine reported an error.")
    if isinstance(fields.code, int) and fields.code in _PASSED_ON:
        return _refused(fields.code, fields)
    return UpstreamFailed("The engine reported an error while generating.")
