"""OpenAI's response shapes. Plain dictionaries in, bytes out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.outbox import Delta
from engine.tokenizer import Tokenizer
from engine.types import FinishReason, Sampled

DONE = b"data: [DONE]\n\n"
_WIRE_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


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

    def text_chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """New text of one choice."""
        logprobs = self._logprobs(delta.sampled)
        body = {"delta": {"content": delta.text}} if self._chat else {"text": delta.text}
        return self._of(index, {**body, "logprobs": logprobs, "finish_reason": None})

    def finish_chunk(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """The end of one choice."""
        body: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._of(index, {**body, "logprobs": None, "finish_reason": _WIRE_REASONS[reason]})

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk before [DONE]."""
        return {**self._chunk, "choices": [], "usage": usage.as_dict()}

    def body(self, deltas: list[Delta], usage: Usage) -> dict[str, Any]:
        """A whole answer; `deltas` are the merged deltas by choice."""
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self._base, "choices": choices, "usage": usage.as_dict()}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        assert delta.finish is not None
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        body: dict[str, Any] = {"message": message} if self._chat else {"text": delta.text}
        return {
            "index": index,
            **body,
            "logprobs": self._logprobs(delta.sampled),
            "finish_reason": _WIRE_REASONS[delta.finish],
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
