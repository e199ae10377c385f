"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.errors import BadRequest
from serving.schemas.ask import Ask, bound, estimate, json_size, size
from serving.schemas.decode import convert, decode
from serving.schemas.sampling import SAMPLING, Anything, Sampling, Tokens, ask, picked


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    # what an answer carries when a client sends it back as history
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Anything = None
    audio: None = None  # only null
    function_call: None = None

    def forwarded(self) -> dict[str, Any]:
        """As the engine gets it: `developer` is the newer word for `system`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message

    def texts(self) -> list[str]:
        """All text that a template may write."""
        texts = [self.content] if isinstance(self.content, str) else []
        if isinstance(self.content, list):
            texts += [part.text for part in self.content if isinstance(part, TextPart)]
        texts += [text for text in (self.name, self.tool_call_id, self.reasoning_content) if text]
        return texts


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Checked for its type only; what it asks for is the engine's matter."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]


class ChatBody(Sampling, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # documented by OpenAI, without effect here
    metadata: Anything = None
    store: Anything = None
    service_tier: Anything = None
    prediction: Anything = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Anything = None
    modalities: list[Literal["text"]] | None = None


_FORWARDED = (*SAMPLING, "top_logprobs", "response_format", "tools", "tool_choice")
_decoder = msgspec.json.Decoder(ChatBody)


def chat(raw: bytes) -> Ask:
    """Read a chat completion request; raises BadRequest naming the field."""
    body = decode(_decoder, raw)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.response_format is not None:
        convert(body.response_format, ResponseFormat, "response_format")
    upstream = picked(body, _FORWARDED)
    upstream["messages"] = [message.forwarded() for message in body.messages]
    if body.tools and body.parallel_tool_calls is not None:
        upstream["parallel_tool_calls"] = body.parallel_tool_calls
    limit = body.max_completion_tokens or body.max_tokens
    about, most = sizes(body.messages, body.tools, body.response_format)
    return ask(body, upstream, limit=limit, choices=body.n or 1, estimate=about, bound=most)


def sizes(messages: list[Message], *forms: Any) -> tuple[int, int]:
    """Tokens of a chat, roughly and at most; `forms` are tools and schemas, which may be written into the prompt."""
    characters = most = 0
    for message in messages:
        for text in message.texts():
            characters += len(text)
            most += size(text)
        if message.tool_calls:
            called = json_size(message.tool_calls)
            characters += called
            most += called
    most += sum(map(json_size, forms))
    return estimate(characters), bound(most, len(messages))
