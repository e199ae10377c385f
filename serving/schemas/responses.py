"""The body of POST /v1/responses: OpenAI's Responses API without anything that would have to be stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.schemas.sampling import Anything, EndUser, ModelName, Tokens, TopP

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Of an earlier answer that is sent back; its annotations and log-probabilities are dropped."""

    text: str


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(msgspec.Struct, tag_field="type", tag="function_call", forbid_unknown_fields=True):
    call_id: Name
    name: Name
    arguments: str
    id: str | None = None
    status: str | None = None


class OutputItem(msgspec.Struct, tag_field="type", tag="function_call_output", forbid_unknown_fields=True):
    call_id: Name
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Of an earlier turn; models are not shown their own."""


Item = MessageItem | CallItem | OutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: Name


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """No form at all."""


class JsonFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, kw_only=True):
    name: Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | JsonFormat | SchemaFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Anything = None
    generate_summary: Anything = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: ModelName
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    user: EndUser | None = None
    safety_identifier: EndUser | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    # accepted, and told what came of it
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Anything = None
    max_tool_calls: int | None = None
    # refused unless empty: they need a memory
    previous_response_id: str | None = None
    conversation: Anything = None
    background: bool | None = None
    prompt: Anything = None
