"""OpenAI's response shapes. Plain dictionaries in, bytes out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.server.reader import Said
from engine.tokenizer import Tokenizer
from engine.tools.parser import CallPart
from engine.types import Sampled

DONE = b"data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


@dataclass(slots=True)
class Usage:
    """Token counts of a request so far, all choices together."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Shape:
    """Chunks and bodies of one response, for chat or for text completions."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, *, chat: bool) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._chunk = self._base | {"object": "chat.completion.chunk"} if chat else self._base

    def role_chunk(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat choice."""
        delta = {"role": "assistant", "content": ""}
        return self._of(index, {"delta": delta, "logprobs": None, "finish_reason": None})

    def text_chunk(self, index: int, said: Said) -> dict[str, Any]:
        """New text, or new parts of calls, of one choice."""
        logprobs = self._logprobs(said.sampled)
        body: dict[str, Any] = {"delta": _spoken(said)} if self._chat else {"text": said.content}
        return self._of(index, {**body, "logprobs": logprobs, "finish_reason": None})

    def finish_chunk(self, index: int, reason: str) -> dict[str, Any]:
        """The end of one choice."""
        body: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._of(index, {**body, "logprobs": None, "finish_reason": reason})

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk before [DONE]."""
        return {**self._chunk, "choices": [], "usage": usage.as_dict()}

    def body(self, answers: list[Said], usage: Usage) -> dict[str, Any]:
        """A whole answer, choice by choice."""
        choices = [self._choice(index, said) for index, said in enumerate(answers)]
        return {**self._base, "choices": choices, "usage": usage.as_dict()}

    def _choice(self, index: int, said: Said) -> dict[str, Any]:
        body: dict[str, Any] = {"message": _message(said)} if self._chat else {"text": said.content}
        return {
            "index": index,
            **body,
            "logprobs": self._logprobs(said.sampled),
            "finish_reason": said.reason,
        }

    def _of(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk, "choices": [{"index": index, **choice}]}

    def _logprobs(self, sampled: list[Sampled]) -> dict[str, Any] | None:
        if not sampled:
            return None
        return self._chat_logprobs(sampled) if self._chat else self._text_logprobs(sampled)

    def _chat_logprobs(self, sampled: list[Sampled]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(s.token_id, s.logprob or 0.0),
                    "top_logprobs": [self._token(id, value) for id, value in s.top],
                }
                for s in sampled
            ],
            "refusal": None,
        }

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(id)),
        }

    def _text_logprobs(self, sampled: list[Sampled]) -> dict[str, Any]:
        text = self._tokenizer.token_text
        return {
            "tokens": [text(s.token_id) for s in sampled],
            "token_logprobs": [s.logprob for s in sampled],
            "top_logprobs": [{text(id): value for id, value in s.top} for s in sampled],
            "text_offset": [],
        }


def _spoken(said: Said) -> dict[str, Any]:
    """Content, parts of calls, or both. One chunk holds at most one part of a call: clients join them by index."""
    delta: dict[str, Any] = {}
    if said.content or not said.calls:
        delta["content"] = said.content
    if said.calls:
        delta["tool_calls"] = [{"index": part.index, **_call(part)} for part in said.calls]
    return delta


def _message(said: Said) -> dict[str, Any]:
    content = said.content if said.content or not said.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if said.calls:
        message["tool_calls"] = [_call(part) for part in said.calls]
    return message


def _call(part: CallPart) -> dict[str, Any]:
    function = {"arguments": part.arguments}
    if part.id is None:
        return {"function": function}
    return {"id": part.id, "type": "function", "function": {"name": part.name, **function}}
