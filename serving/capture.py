"""The words of a request, for tenants that chose to keep them: bounded and redacted before they leave memory.

A Request has a Capture only where its tenant opted in; everybody else pays one comparison. The answer is collected as
its client gets it: behind stop strings, from the attempt that answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from serving.port import RequestContent, Said
from serving.redaction import MARGIN, redacted
from serving.schemas import Ask
from serving.stream import Piece

LIMIT = 32 * 1024  # bytes of a prompt, and of an answer
_ENOUGH = LIMIT + MARGIN


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None
    text: str | None = None


class _Whole(msgspec.Struct):
    choices: list[_Choice] = []


_wholes = msgspec.json.Decoder(_Whole)


class Capture:
    """Collects one request's prompt and answer."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._said: dict[tuple[int, str], list[str]] = {}  # by choice and what it is
        self._size = 0
        self._more = False

    def add(self, pieces: Iterable[Piece]) -> None:
        """The next pieces on their way to the client."""
        for piece in pieces:
            choice = piece.choice
            if choice.text:
                self._take(choice.index, "assistant", choice.text)
            delta = choice.delta
            if delta is None:
                continue
            self._take(choice.index, "reasoning", delta.reasoning_content or delta.reasoning)
            self._take(choice.index, "assistant", delta.content or delta.refusal)
            for call in delta.tool_calls or ():
                function = call.get("function") or {}
                self._take(choice.index, "call", function.get("name"))
                self._take(choice.index, "call", function.get("arguments"))

    def take_whole(self, body: bytes) -> None:
        """The engine's answer in one piece; one that cannot be read leaves nothing."""
        try:
            answer = _wholes.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return
        for choice in answer.choices:
            self._take(choice.index, "assistant", choice.text)
            message = choice.message
            if message is None:
                continue
            self._take(choice.index, "reasoning", message.reasoning_content or message.reasoning)
            self._take(choice.index, "assistant", message.content or message.refusal)
            for call in message.tool_calls or ():
                if call.function is not None:
                    self._take(choice.index, "call", call.function.name)
                    self._take(choice.index, "call", call.function.arguments)

    def reset(self) -> None:
        """Another attempt begins, and its client had nothing of this one."""
        self._said.clear()
        self._size = 0
        self._more = False

    def content(self, request_id: str, started_at: float, tenant_id: str) -> RequestContent:
        """All of it, redacted. The newest messages of a prompt are kept first, and the beginning of each."""
        prompt, left_out = _kept(reversed(_prompt(self._ask.upstream)))
        answer, _ = _kept((kind, "".join(parts)) for (_, kind), parts in sorted(self._said.items()))
        if self._more and answer:
            answer[-1] = msgspec.structs.replace(answer[-1], cut=True)
        return RequestContent(
            id=request_id,
            started_at=started_at,
            tenant_id=tenant_id,
            prompt=tuple(reversed(prompt)),
            answer=tuple(answer),
            left_out=left_out,
        )

    def _take(self, index: int, kind: str, text: Any) -> None:
        """Engines choose what stands in a call: whatever is no text is nothing."""
        if not isinstance(text, str) or not text:
            return
        room = _ENOUGH - self._size
        if len(text) > room:
            self._more = True
            text = text[:room]
        if text:
            self._size += len(text)
            self._said.setdefault((index, kind), []).append(text)


def _prompt(upstream: dict[str, Any]) -> list[tuple[str, str]]:
    """Role and text of each message, or of each prompt or input; token ids are no text."""
    if "messages" in upstream:
        return [(str(message.get("role", "")), _text(message)) for message in upstream["messages"]]
    prompts = upstream.get("prompt", upstream.get("input"))
    prompts = [prompts] if isinstance(prompts, str) else prompts or ()
    return [("prompt", text) for text in prompts if isinstance(text, str)]


def _text(message: dict[str, Any]) -> str:
    """What a message says, its calls of functions included."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [str(part.get("text") or "") for part in content or ()]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [str(function.get("name") or ""), str(function.get("arguments") or "")]
    return "\n".join(parts)


def _kept(said: Iterable[tuple[str, str]]) -> tuple[list[Said], int]:
    """As many as have room, redacted, and how many had none."""
    kept: list[Said] = []
    left_out, room = 0, LIMIT
    for role, text in said:
        if room <= 0:
            left_out += 1
            continue
        clean = redacted(text[: room + MARGIN], min(room, len(text))).encode()
        kept.append(Said(role, clean[:room].decode(errors="ignore"), len(text) > room or len(clean) > room))
        room -= len(clean)
    return kept, left_out
