"""An answer, and an error, in the words of Anthropic's Messages API."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from serving.errors import GatewayError
from serving.metering import Billed
from serving.request import Request
from serving.translate.narrate import Event
from serving.translate.parts import CALL, REASONING, TEXT, Change, Part, Parts

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


class MessageNarrator:
    """Told in the order that Anthropic's clients expect: message_start, blocks, message_delta, message_stop."""

    def __init__(self, request: Request) -> None:
        assert request.ask is not None and request.route is not None
        self._request_id = request.id
        self._model = request.route.name
        self._shows_reasoning = bool(request.ask.told)
        self._blocks = itertools.count()
        self._block = -1  # index of the open one
        self._pinged = False

    def begin(self, usage: Billed) -> Iterable[Event]:
        yield {"type": "message_start", "message": self._message([], None, None, usage)}

    def tell(self, change: Change) -> Iterable[Event]:
        part = change.part
        if part.kind == REASONING and not self._shows_reasoning:
            return
        if change.what == "opened":
            self._block = next(self._blocks)
            yield {"type": "content_block_start", "index": self._block, "content_block": _opened(part)}
            if not self._pinged:
                self._pinged = True
                yield {"type": "ping"}
        elif change.what == "grown":
            yield self._delta(_grown(part.kind, change.text))
        else:
            if part.kind == REASONING:
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield {"type": "content_block_stop", "index": self._block}

    def end(self, parts: Parts, usage: Billed) -> Iterable[Event]:
        reason, stop = _stop(parts)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def fail(self, error: GatewayError) -> Iterable[Event]:
        yield described(error, self._request_id)

    def body(self, parts: Parts, usage: Billed) -> dict[str, Any]:
        shown = [part for part in parts.all if part.kind != REASONING or self._shows_reasoning]
        return self._message([_whole(part) for part in shown], *_stop(parts), usage)

    def _message(self, content: list[Any], reason: str | None, stop: str | None, usage: Billed) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(usage),
        }

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}


def described(error: GatewayError, request_id: str) -> Event:
    """Anthropic's error object, which is a body and an event alike."""
    kind = _ERRORS.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def _stop(parts: Parts) -> tuple[str, str | None]:
    ending = parts.ending
    if ending.stop is not None:
        return "stop_sequence", ending.stop
    if ending.reason in _REASONS:
        return _REASONS[ending.reason], None
    # a call that tool_choice named ends with `stop` in chat completions, but is a use of a tool here
    return "tool_use" if any(part.kind == CALL for part in parts.all) else "end_turn", None


def _usage(usage: Billed) -> dict[str, int]:
    """Anthropic's `input_tokens` are those that no cache had."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _opened(part: Part) -> dict[str, Any]:
    if part.kind == TEXT:
        return {"type": "text", "text": ""}
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _grown(kind: str, text: str) -> dict[str, Any]:
    if kind == TEXT:
        return {"type": "text_delta", "text": text}
    if kind == REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _whole(part: Part) -> dict[str, Any]:
    block = _opened(part)
    if part.kind == TEXT:
        block["text"] = part.text
    elif part.kind == REASONING:
        block["thinking"] = part.text
    else:
        block["input"] = _input(part.text)
    return block


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; what a model has written wrongly, or not to its end, is kept as the text that it is."""
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}
