"""What a choice says, apart: content and calls of functions, and the reason of its end in OpenAI's words."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.outbox import Delta
from engine.tools.parser import CallPart, Parsed, ToolParser
from engine.tools.tool import ToolUse
from engine.types import FinishReason, Sampled


@dataclass(slots=True)
class Said:
    """What is new in one choice, ready to be written."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.sampled)


class ChoiceReader:
    """Turns the deltas of one choice into Said, reading calls where the request has tools."""

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._parser = ToolParser() if use else None
        self._undecided: list[Sampled] = []

    def read(self, delta: Delta) -> Said:
        """Take a delta; the last one has a reason."""
        if self._parser is None:
            return Said(delta.text, [], delta.sampled, self._reason(delta))
        parsed = self._parser.push(delta.text)
        self._undecided += delta.sampled
        if delta.finish is not None:
            rest = self._parser.finish(complete=delta.finish is FinishReason.STOP)
            parsed.content += rest.content
        sampled = self._decided(parsed, self._parser)
        return Said(parsed.content, parsed.calls, sampled, self._reason(delta))

    def _decided(self, parsed: Parsed, parser: ToolParser) -> list[Sampled]:
        """Log-probabilities are those of content: tokens that may be a tag wait, those of calls are dropped."""
        if parsed.content and not parser.in_call:
            decided, self._undecided = self._undecided, []
            return decided
        if parser.in_call or parser.calls:
            self._undecided.clear()
        return []

    def _reason(self, delta: Delta) -> str | None:
        """`tool_calls` where the model chose what to call; a named call ends with `stop`, as OpenAI's does."""
        if delta.finish is FinishReason.LENGTH:
            return "length"
        if delta.finish is not FinishReason.STOP:
            return None
        called = self._parser is not None and self._parser.calls > 0
        return "tool_calls" if called and self._use is not None and self._use.named is None else "stop"
