"""From OpenAI's Responses body to a chat completion."""

from __future__ import annotations

from typing import Any

import msgspec

from serving.errors import BadRequest
from serving.schemas.ask import Ask
from serving.schemas.decode import convert, decode
from serving.schemas.responses import (
    CallItem,
    InputText,
    Item,
    MessageItem,
    NamedChoice,
    OutputItem,
    OutputText,
    Refusal,
    ResponsesBody,
    SchemaFormat,
    TextConfig,
    TextFormat,
)
from serving.translate.asked import Chat, asked, called, function, named, returned, said

_decoder = msgspec.json.Decoder(ResponsesBody)
_LOGPROBS = "message.output_text.logprobs"
_NEEDS_MEMORY = ("previous_response_id", "conversation", "background", "prompt")


def responses(raw: bytes) -> Ask:
    """Read a request for a response; raises BadRequest naming the field. `told` is what the response repeats of it."""
    body = decode(_decoder, raw)
    for name in _NEEDS_MEMORY:
        if getattr(body, name):
            raise BadRequest(
                f"`{name}` needs stored responses, and none are stored here: send the whole conversation as `input`.",
                param=name,
                code="unsupported_parameter",
            )
    upstream = {
        "messages": _chat(body),
        "tools": [function(t.name, t.description, t.parameters, t.strict) for t in body.tools or ()] or None,
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls if body.tools else None,
        "response_format": _format(body.text),
        "temperature": body.temperature,
        "top_p": body.top_p,
        **_logprobs(body),
    }
    return asked(
        upstream,
        model=body.model,
        stream=bool(body.stream),
        limit=body.max_output_tokens,
        user=body.user or body.safety_identifier,
        told=_told(body),
    )


def _chat(body: ResponsesBody) -> Chat:
    chat: Chat = []
    if body.instructions:
        chat.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        chat.append({"role": "user", "content": body.input})
        return chat
    for number, given in enumerate(body.input):
        item = {"type": "message", **given} if "role" in given else given
        _take(convert(item, Item, f"input[{number}]"), chat)  # type: ignore[arg-type]
    if not any(message["role"] != "system" for message in chat):
        raise BadRequest("The input holds nothing that could be answered.", param="input")
    return chat


def _take(item: Item, chat: Chat) -> None:
    if isinstance(item, MessageItem):
        said("system" if item.role == "developer" else item.role, _text(item.content), chat)
    elif isinstance(item, CallItem):
        called(item.call_id, item.name, item.arguments, chat)
    elif isinstance(item, OutputItem):
        returned(item.call_id, _text(item.output), chat)


def _text(content: str | list[InputText | OutputText | Refusal] | list[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


def _choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if choice is None or (not body.tools and choice in ("none", "auto")):
        return None
    if not body.tools:
        raise BadRequest("tool_choice needs tools.", param="tool_choice")
    return named(choice.name) if isinstance(choice, NamedChoice) else choice


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    wanted = text.format if text else None
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    if not isinstance(wanted, SchemaFormat):
        return {"type": "json_object"}
    told = {"name": wanted.name, "schema": wanted.schema, "description": wanted.description, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": {key: value for key, value in told.items() if value is not None}}


def _logprobs(body: ResponsesBody) -> dict[str, Any]:
    if not body.top_logprobs and _LOGPROBS not in (body.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs or None}


def _told(body: ResponsesBody) -> dict[str, Any]:
    """The request's half of a response object."""
    text = body.text or TextConfig()
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text.format or TextFormat(), "verbosity": text.verbosity},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
