"""From the engine's chunks to what a client may see, and how far a client may lag behind.

`Editor` is pure: it drops chunks without text, splits the finish from the content, and applies stop strings. Where
nothing has to change, a chunk's `choices` pass through as the bytes they came in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from serving.eager import Driven, Work
from serving.errors import ClientLeft, SlowReader, UpstreamFailed
from serving.stops import StopFilter
from serving.upstream import Choice, Delta, parse_choices

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 30.0
BROKEN = frozenset(("abort", "error"))  # the engine's words for an end that is not one


class Piece(msgspec.Struct):
    """One thing to tell the client about one choice. `raw` is a JSON array holding just that choice."""

    choice: Choice
    raw: bytes
    stopped_by: str | None = None  # the stop string that ended this choice


NOTHING: list[Piece] = []


class Editor:
    """Turns the `choices` of an engine's chunks into Pieces; knows when every choice has finished."""

    def __init__(self, *, chat: bool, choices: int, stops: Sequence[str]) -> None:
        self._chat = chat
        self.several = choices > 1
        self._open = set(range(choices))
        self._filters = {index: StopFilter(stops) for index in self._open} if stops else {}
        self._held_logprobs: dict[int, dict[str, Any]] = {}
        self.stopped_early = False  # a stop string ended what the engine has not
        self.finish_reason = ""
        self.heard = 0  # chunks with text, each at least one token

    @property
    def finished(self) -> bool:
        return not self._open

    def edit(self, raw: msgspec.Raw) -> list[Piece]:
        try:
            choices = parse_choices(raw)
        except msgspec.DecodeError:
            raise UpstreamFailed("The engine sent a chunk that cannot be read.") from None
        if not choices:
            return NOTHING
        if len(choices) == 1 and not self._filters and choices[0].finish_reason is None:
            return self._verbatim(choices[0], raw)
        pieces: list[Piece] = []
        for choice, source in zip(choices, msgspec.json.decode(raw), strict=True):
            if choice.index in self._open:
                self._edit_one(choice, source, pieces)
        return pieces

    def _verbatim(self, choice: Choice, raw: msgspec.Raw) -> list[Piece]:
        if choice.index not in self._open or not choice.says_something():
            return NOTHING
        self.heard += 1
        return [Piece(choice, bytes(raw))]

    def _edit_one(self, choice: Choice, source: dict[str, Any], pieces: list[Piece]) -> None:
        reason, choice.finish_reason = choice.finish_reason, None
        if reason in BROKEN:
            raise UpstreamFailed("The engine gave up on this request.")
        source["finish_reason"] = None
        said = choice.says_something()
        self.heard += said
        stop = self._filters.get(choice.index)
        if stop is not None:
            self._filter(stop, choice, source, ended=reason is not None)
            if stop.matched is not None:
                self.stopped_early = self.stopped_early or reason is None
                reason = "stop"
            said = choice.says_something()
        if said:
            pieces.append(Piece(choice, msgspec.json.encode([source])))
        if reason is not None:
            self._open.discard(choice.index)
            self.finish_reason = reason
            pieces.append(self._finish(choice.index, reason, None if stop is None else stop.matched))

    def _filter(self, stop: StopFilter, choice: Choice, source: dict[str, Any], *, ended: bool) -> None:
        """Replace the text of a choice by what may be shown; its logprobs wait for the text they belong to."""
        shown = stop.feed(self._text(choice))
        calls = choice.delta is not None and choice.delta.tool_calls
        if (ended or calls) and stop.matched is None:
            shown += stop.flush()  # no stop string goes on behind a call, and text before it must not come after it
        if not self._chat:
            choice.text = source["text"] = shown
        elif shown or self._text(choice):
            if choice.delta is None:
                choice.delta, source["delta"] = Delta(), {}
            choice.delta.content = source["delta"]["content"] = shown
        held = self._held_logprobs.pop(choice.index, None)
        logprobs = merged_logprobs(held, choice.logprobs)
        if logprobs is not None:
            if not choice.says_something():
                self._held_logprobs[choice.index] = logprobs
            choice.logprobs = source["logprobs"] = logprobs

    def _text(self, choice: Choice) -> str:
        if self._chat:
            return (choice.delta.content if choice.delta is not None else None) or ""
        return choice.text or ""

    def _finish(self, index: int, reason: str, stopped_by: str | None) -> Piece:
        said = b'"delta":{}' if self._chat else b'"text":""'
        raw = b'[{"index":%d,%s,"logprobs":null,"finish_reason":%s}]'
        choice = Choice(index=index, finish_reason=reason)
        return Piece(choice, raw % (index, said, msgspec.json.encode(reason)), stopped_by)


def merged_logprobs(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """Logprobs of two stretches of text as those of one: every list continues."""
    if one is None or other is None:
        return one or other
    merged = dict(one)
    for key, value in other.items():
        mine = merged.get(key)
        both = isinstance(mine, list) and isinstance(value, list)
        merged[key] = mine + value if both and mine is not None else value or mine
    return merged


class Outbox:
    """Bytes on their way to a client, written at once; bounded, so that a client which does not read is found out.

    Chunks that arrive while a write waits leave with the next one, together.
    """

    def __init__(self, write: Callable[[bytes, bool], Work[None]], limit: int) -> None:
        self._write = write
        self._limit = limit
        self._pending: list[bytes] = []
        self._unsent = 0
        self._closed = False
        self._broken = False
        self._writing: Driven | None = None
        self._finished: asyncio.Future[None] | None = None

    def put(self, data: bytes) -> None:
        """Send bytes; raises SlowReader when the client has too many unread ones already."""
        if self._broken:
            raise ClientLeft
        if self._writing is None:
            self._send(data)
            return
        self._unsent += len(data)
        if self._unsent > self._limit:
            raise SlowReader("The client did not read its stream.")
        self._pending.append(data)

    async def close(self, last: bytes) -> None:
        """Write what is left, then `last`, and end; raises SlowReader where the client will not take it."""
        self._closed = True
        self._pending.append(last)
        if self._writing is None:
            self._next()
        if self._writing is not None and not self._broken:
            self._finished = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    await self._finished
            except TimeoutError:
                raise SlowReader("The client did not read its stream.") from None
        if self._broken:
            raise ClientLeft

    def abandon(self) -> None:
        """Write nothing more."""
        self._broken = True
        if self._writing is not None:
            self._writing.close()
            self._writing = None

    def _next(self) -> None:
        data = b"".join(self._pending)
        self._pending.clear()
        self._unsent = 0
        self._send(data, last=self._closed)

    def _send(self, data: bytes, *, last: bool = False) -> None:
        self._writing = Driven(self._write(data, not last), self._written)
        self._writing.start()

    def _written(self, _nothing: None, error: BaseException | None) -> None:
        self._writing = None
        if error is not None:
            self._broken = True
            if not isinstance(error, OSError):
                log.error("a stream could not be written", exc_info=error)
        elif self._pending:
            self._next()
            return
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)
