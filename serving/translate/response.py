"""An answer in the words of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from serving.errors import GatewayError
from serving.metering import Billed
from serving.request import Request
from serving.translate.narrate import Event
from serving.translate.parts import CALL, REASONING, TEXT, Change, Part, Parts

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_KIND = {TEXT: "output_text", REASONING: "reasoning_text"}
_PREFIX = {TEXT: "msg", REASONING: "rs", CALL: "fc"}


class ResponseNarrator:
    """Told as items: every part of an answer is one, a message having one part of content."""

    def __init__(self, request: Request) -> None:
        assert request.ask is not None and request.route is not None
        self._id = request.id
        self._head = {
            "id": f"resp_{request.id}",
            "object": "response",
            "created_at": int(request.arrival.started_at),
            "model": request.route.name,
            **request.ask.told,
        }
        self._number = 0
        self._done: list[dict[str, Any]] = []

    def begin(self, usage: Billed) -> Iterable[Event]:
        response = self._response("in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def tell(self, change: Change) -> Iterable[Event]:
        part = change.part
        if change.what == "opened":
            return self._open(part)
        if change.what == "grown":
            return (self._grow(change),)
        return self._close(part)

    def end(self, parts: Parts, usage: Billed) -> Iterable[Event]:
        response = self._ended(parts, usage)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: GatewayError) -> Iterable[Event]:
        yield self._event("error", code=error.code, message=error.message, param=error.param)
        told = {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}
        yield self._event("response.failed", response=self._response("failed", self._done, error=told))

    def body(self, parts: Parts, usage: Billed) -> dict[str, Any]:
        return self._ended(parts, usage)

    def _open(self, part: Part) -> Iterable[Event]:
        yield self._event("response.output_item.added", output_index=part.index, item=self._item(part, "in_progress"))
        if part.kind != CALL:
            yield self._content("response.content_part.added", part, part=_content(part, ""))

    def _grow(self, change: Change) -> Event:
        part = change.part
        if part.kind == CALL:
            return self._of("response.function_call_arguments.delta", part, delta=change.text)
        more = {"logprobs": change.logprobs} if part.kind == TEXT else {}
        return self._content(f"response.{_KIND[part.kind]}.delta", part, delta=change.text, **more)

    def _close(self, part: Part) -> Iterable[Event]:
        item = self._item(part, "completed")
        self._done.append(item)
        if part.kind == CALL:
            yield self._of("response.function_call_arguments.done", part, name=part.name, arguments=part.text)
        else:
            more = {"logprobs": part.logprobs} if part.kind == TEXT else {}
            yield self._content(f"response.{_KIND[part.kind]}.done", part, text=part.text, **more)
            yield self._content("response.content_part.done", part, part=_content(part, part.text))
        yield self._event("response.output_item.done", output_index=part.index, item=item)

    def _ended(self, parts: Parts, usage: Billed) -> dict[str, Any]:
        why = _INCOMPLETE.get(parts.ending.reason)
        status = "incomplete" if why else "completed"
        output = [self._item(part, "completed") for part in parts.all]
        if why and output and "status" in output[-1]:
            output[-1]["status"] = "incomplete"
        details = {"reason": why} if why else None
        return self._response(status, output, usage=_usage(usage), incomplete_details=details)

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        told = {**self._head, "status": status, "output": output, "error": None, "incomplete_details": None}
        if status == "completed":
            told["completed_at"] = int(time.time())
        return {**told, "usage": None, **more}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        begun = status == "in_progress"
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        if part.kind == CALL:
            called = {"call_id": part.call_id, "name": part.name, "arguments": "" if begun else part.text}
            return {"type": "function_call", **item, **called}
        content = [] if begun else [_content(part, part.text)]
        if part.kind == REASONING:
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _item_id(self, part: Part) -> str:
        return f"{_PREFIX[part.kind]}_{self._id}_{part.index}"

    def _content(self, name: str, part: Part, /, **more: Any) -> Event:
        return self._of(name, part, content_index=0, **more)

    def _of(self, name: str, part: Part, /, **more: Any) -> Event:
        return self._event(name, item_id=self._item_id(part), output_index=part.index, **more)

    def _event(self, name: str, /, **more: Any) -> Event:
        event = {"type": name, "sequence_number": self._number, **more}
        self._number += 1
        return event


def _content(part: Part, text: str) -> dict[str, Any]:
    content: dict[str, Any] = {"type": _KIND[part.kind], "text": text}
    if part.kind == TEXT:
        content |= {"annotations": [], "logprobs": part.logprobs if text else []}
    return content


def _usage(usage: Billed) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
