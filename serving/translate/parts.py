"""The pieces of a chat answer as a row of parts: reasoning, text, calls of functions, one after the other."""

from __future__ import annotations

from typing import Any

import msgspec

from serving.errors import UpstreamFailed
from serving.stream import Piece

TEXT = "text"
REASONING = "reasoning"
CALL = "call"


class Part(msgspec.Struct, kw_only=True):
    """One stretch of an answer; `pieces` are its text, or the arguments of its call."""

    kind: str
    index: int  # among the parts of the answer
    call_id: str = ""
    name: str = ""  # of the function
    pieces: list[str] = []
    logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(msgspec.Struct, frozen=True):
    """What has happened to a part: it was opened, has grown by `text`, or is complete."""

    what: str  # "opened", "grown", "closed"
    part: Part
    text: str = ""
    logprobs: list[dict[str, Any]] = []


class Ending(msgspec.Struct, frozen=True):
    """Why the answer ended, in the words of chat completions, and the stop string that ended it."""

    reason: str
    stop: str | None = None


class Parts:
    """Grows by the pieces of one choice. Pure."""

    def __init__(self, name: str) -> None:
        self.all: list[Part] = []
        self.ending = Ending("")
        self._name = name  # makes ids for calls that come without
        self._open: Part | None = None
        self._calls: dict[int, Part] = {}

    def take(self, piece: Piece) -> list[Change]:
        """Add a piece; returns what changed, in order."""
        choice = piece.choice
        if choice.finish_reason:
            self.ending = Ending(choice.finish_reason, piece.stopped_by)
        changes: list[Change] = []
        delta = choice.delta
        if delta is None:
            return changes
        logprobs = (choice.logprobs or {}).get("content") or []
        if reasoning := delta.reasoning_content or delta.reasoning:
            self._say(REASONING, reasoning, [], changes)
        if text := (delta.content or "") + (delta.refusal or ""):
            self._say(TEXT, text, logprobs, changes)
        for position, call in enumerate(delta.tool_calls or ()):
            self._extend(call.get("index", position), call, changes)
        return changes

    def end(self) -> list[Change]:
        """Nothing more comes; returns what changed."""
        changes: list[Change] = []
        self._close(changes)
        return changes

    def _say(self, kind: str, text: str, logprobs: list[dict[str, Any]], changes: list[Change]) -> None:
        part = self._open
        if part is None or part.kind != kind:
            part = self._begin(Part(kind=kind, index=len(self.all)), changes)
        part.logprobs += logprobs
        self._grow(part, text, changes, logprobs)

    def _extend(self, index: int, told: dict[str, Any], changes: list[Change]) -> None:
        function = told.get("function") or {}
        part = self._calls.get(index)
        if part is None:
            call_id = told.get("id") or f"call_{self._name}_{index}"
            fresh = Part(kind=CALL, index=len(self.all), call_id=call_id, name=function.get("name") or "")
            part = self._calls[index] = self._begin(fresh, changes)
        if arguments := function.get("arguments"):
            if part is not self._open:
                raise UpstreamFailed("The engine mixed the parts of several calls.")
            self._grow(part, arguments, changes, [])

    def _begin(self, part: Part, changes: list[Change]) -> Part:
        self._close(changes)
        self._open = part
        self.all.append(part)
        changes.append(Change("opened", part))
        return part

    def _grow(self, part: Part, text: str, changes: list[Change], logprobs: list[dict[str, Any]]) -> None:
        part.pieces.append(text)
        changes.append(Change("grown", part, text, logprobs))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change("closed", self._open))
            self._open = None
