"""The bodies of POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as far as it is text and tools.

Blocks and tools of other kinds (images, documents, tools that Anthropic's servers run) are refused by their type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.schemas.sampling import Anything, ModelName, Stop, Tokens, TopP

MAX_STOP_SEQUENCES = 16


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: Anything = None  # the engine's prefix cache needs no marks
    citations: Anything = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=256)]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: dict[str, Any]
    cache_control: Anything = None
    caller: Anything = None
    toolset_name: Anything = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: Annotated[str, Meta(min_length=1, max_length=256)]
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Anything = None
    toolset_name: Anything = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """Of an earlier turn; models are not shown their own."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True):
    """Only those that the client runs itself; their other fields are hints for Anthropic's servers."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


class Thinking(msgspec.Struct):
    """Whether the answer may show reasoning; how long it is remains the model's matter."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: Anything = None
    task_budget: Anything = None


class Prompt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both bodies hold, as far as it is counted."""

    model: ModelName
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=4096)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format
    # documented by Anthropic, without effect here
    cache_control: Anything = None
    context_management: Anything = None
    speed: Anything = None


class MessagesBody(Prompt, forbid_unknown_fields=True, kw_only=True):
    max_tokens: Tokens
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOP_SEQUENCES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    metadata: Metadata | None = None
    # documented by Anthropic, without effect here
    service_tier: Anything = None
    inference_geo: Anything = None
    diagnostics: Anything = None
    container: None = None  # only null: nothing runs on a server here


class CountBody(Prompt, forbid_unknown_fields=True, kw_only=True):
    """The same without what only an answer needs."""
