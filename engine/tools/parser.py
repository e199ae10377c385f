"""From what a model writes to content and calls, however the text is cut into pieces."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.tools.tool import CLOSE, OPEN

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(slots=True)
class CallPart:
    """What is new of one call: `id` and `name` come once, arguments bit by bit."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What is new: text for the reader, and at most one part of each call."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def part(self, index: int) -> CallPart:
        """The part of a call, begun if need be."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallPart(index))
        return self.calls[-1]


def new_id() -> str:
    """As OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """Reads `<tool_call>{"name": …, "arguments": {…}}</tool_call>` out of a stream; what is around it is content.

    Tags are never content, nor is the space before and between them. The arguments are passed on as written.
    """

    def __init__(self, make_id: Callable[[], str] = new_id) -> None:
        self.calls = 0
        self._make_id = make_id
        self._held = ""
        self._read: Callable[[Parsed], bool] = self._content
        self._depth = 0
        self._quoted = False
        self._escaped = False

    @property
    def in_call(self) -> bool:
        """True from an opening tag to its closing one."""
        return self._read != self._content

    def push(self, text: str) -> Parsed:
        """Take the next text."""
        self._held += text
        parsed = Parsed()
        while self._read(parsed):
            pass
        return parsed

    def finish(self, *, complete: bool) -> Parsed:
        """Nothing follows. The rest is content, unless it was cut where a tag may have begun."""
        held, self._held = self._held, ""
        if self.in_call or (self.calls and not held.strip()) or (_partial(held) and not complete):
            return Parsed()
        return Parsed(held)

    # Each reader takes what it can of the held text; True when another should go on.

    def _content(self, parsed: Parsed) -> bool:
        at = self._held.find(OPEN)
        if at >= 0:
            parsed.content += self._held[:at].rstrip()
            self._held = self._held[at + len(OPEN) :]
            self._read = self._head
            return True
        safe = len(self._held[: len(self._held) - _partial(self._held)].rstrip())
        parsed.content += self._held[:safe]
        self._held = self._held[safe:]
        return False

    def _head(self, parsed: Parsed) -> bool:
        found = _HEAD.match(self._held)
        if found is None:
            return False
        part = parsed.part(self.calls)
        part.id, part.name = self._make_id(), json.loads(found[1])
        self._held = self._held[found.end() :]
        self._read = self._arguments
        return True

    def _arguments(self, parsed: Parsed) -> bool:
        end = self._scan()
        if end:
            parsed.part(self.calls).arguments += self._held[:end]
        self._held = self._held[end:]
        if self._read == self._arguments:
            return False
        self.calls += 1
        return True

    def _scan(self) -> int:
        """How far the object goes in what is held; moves on to the closing tag when it ends."""
        for at, char in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                self._quoted = char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._read = self._tail
                    return at + 1
        return len(self._held)

    def _tail(self, parsed: Parsed) -> bool:
        at = self._held.find(CLOSE)
        if at < 0:
            return False
        self._held = self._held[at + len(CLOSE) :]
        self._read = self._content
        return True


def _partial(text: str) -> int:
    """Length of the longest tail that could grow into an opening tag."""
    return next((size for size in range(min(len(text), len(OPEN) - 1), 0, -1) if OPEN.startswith(text[-size:])), 0)
