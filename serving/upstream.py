"""The engine's side of a request: dispatch it, read its server-sent events, take them apart as far as needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from serving.errors import (
    EngineRefused,
    GatewayError,
    TransportFault,
    Unavailable,
    UpstreamFailed,
)
from serving.metering import Usage
from serving.replicas import Channel

DONE = b"[DONE]"
MAX_EVENT_BYTES = 8 * 1024 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_MAX_WORD = 64
_ERROR_BODY_TIMEOUT_S = 5.0
_DRAIN_TIMEOUT_S = 1.0
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
    """One choice of a chunk: `delta` from chat, `text` from plain completions."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None

    def says_something(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.says_something())


class Chunk(msgspec.Struct):
    """One event, parsed no deeper than is needed to count and to route it."""

    choices: msgspec.Raw = msgspec.Raw(b"[]")
    usage: Usage | None = None
    fanlight: msgspec.Raw = msgspec.Raw(b"")
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


class EngineStream:
    """The open response of an engine. Closing it is the abort."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._content = response.content
        self._parser = EventParser()

    async def read(self) -> list[bytes] | None:
        """Payloads of the next events, all that one read brought; None at the end."""
        try:
            while data := await self._content.readany():
                if payloads := self._parser.feed(data):
                    return payloads
        except (aiohttp.ClientError, OSError) as error:
            raise TransportFault("The connection to the engine broke.") from error
        return None

    def close(self) -> None:
        """Close the connection at once, unless the response has ended and given it back."""
        self._response.close()

    async def drain(self) -> None:
        """Read what follows the last event, so that the connection can be used again."""
        try:
            if not self._content.at_eof():
                async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                    await self._content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        finally:
            if self._content.at_eof():
                self._response.release()
            else:
                self._response.close()


async def open_stream(channel: Channel, path: str, body: bytes, headers: Mapping[str, str]) -> EngineStream:
    """Send the request; returns once the engine has begun to answer it with a stream."""
    try:
        response = await channel.post(path, body, headers)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise TransportFault("The engine could not be reached.") from error
    if response.status == 200:
        if response.content_type != "text/event-stream":
            response.close()
            raise UpstreamFailed("The engine did not answer with a stream.")
        return EngineStream(response)
    try:
        raise await _refusal(response)
    finally:
        response.close()


async def _refusal(response: aiohttp.ClientResponse) -> GatewayError:
    body = b""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(_ERROR_BODY_TIMEOUT_S):
            body = await response.content.read(_MAX_ERROR_BYTES)
    if response.status == 503:
        return Unavailable(
            "The engine has no room for this request now.",
            code="engine_overloaded",
            retry_after=_retry_after(response.headers.get("Retry-After")),
        )
    if response.status not in _PASSED_ON:
        return UpstreamFailed(f"The engine failed with status {response.status}.")
    refused = _refused(response.status, _fields(body))
    if response.status == 429:
        wait = _retry_after(response.headers.get("Retry-After"))
        refused.headers.append((b"retry-after", b"%d" % wait))
    return refused


def _retry_after(value: str | None) -> int:
    return min(max(int(value), 1), 60) if value and value.isdecimal() else 1


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
