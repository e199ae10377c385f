"""From Anthropic's Messages body to a chat completion."""

from __future__ import annotations

from typing import Any

import msgspec

from serving.errors import BadRequest
from serving.schemas.ask import Ask
from serving.schemas.decode import decode
from serving.schemas.messages import (
    CountBody,
    MessagesBody,
    Prompt,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from serving.translate.asked import Chat, asked, called, function, named, returned, said

_messages = msgspec.json.Decoder(MessagesBody)
_count = msgspec.json.Decoder(CountBody)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages(raw: bytes) -> Ask:
    """Read a request for a message; raises BadRequest naming the field. `told` is whether to show reasoning."""
    body = decode(_messages, raw)
    if body.messages[-1].role == "assistant":
        raise BadRequest(
            "The last message must be the user's: answers cannot be begun for the model.", param="messages"
        )
    choice = body.tool_choice
    upstream = {
        **_prompt(body),
        "tool_choice": _choice(choice, body.tools or []),
        "parallel_tool_calls": False if body.tools and choice and choice.disable_parallel_tool_use else None,
        "response_format": _format(body),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k or None,  # 0: all of them, which is also what none means
    }
    return asked(
        upstream,
        model=body.model,
        stream=bool(body.stream),
        limit=body.max_tokens,
        stops=tuple(body.stop_sequences or ()),
        user=(body.metadata.user_id if body.metadata else None) or None,
        told=body.thinking is not None and body.thinking.type != "disabled",
    )


def count(raw: bytes) -> Ask:
    """Read a request to count; raises BadRequest naming the field."""
    body = decode(_count, raw)
    ask = asked(_prompt(body), model=body.model, limit=0)
    ask.prompt_estimate = ask.prompt_bound = 0  # no model runs for it: any length may be counted, and takes no tokens
    return ask


def _prompt(body: Prompt) -> dict[str, Any]:
    chat: Chat = []
    if body.system:
        chat.append({"role": "system", "content": _text(body.system)})
    for number, turn in enumerate(body.messages):
        _take(turn, number, chat)
    if not any(message["role"] != "system" for message in chat):
        raise BadRequest("The messages hold nothing that could be answered.", param="messages")
    tools = [function(t.name, t.description, t.input_schema, t.strict) for t in body.tools or ()]
    return {"messages": chat, "tools": tools or None}


def _take(turn: Turn, number: int, chat: Chat) -> None:
    """Add one turn, which may be several messages of a chat."""
    if isinstance(turn.content, str):
        said(turn.role, turn.content, chat)
        return
    for place, block in enumerate(turn.content):
        where = f"messages[{number}].content[{place}]"
        if isinstance(block, TextBlock):
            said(turn.role, block.text, chat)
        elif isinstance(block, ToolUseBlock):
            _check_role(turn, "assistant", where)
            called(block.id, block.name, msgspec.json.encode(block.input).decode(), chat)
        elif isinstance(block, ToolResultBlock):
            _check_role(turn, "user", where)
            returned(block.tool_use_id, _text(block.content or ""), chat)
        else:
            assert isinstance(block, ThinkingBlock | RedactedThinkingBlock)
            _check_role(turn, "assistant", where)


def _check_role(turn: Turn, role: str, where: str) -> None:
    if turn.role != role:
        raise BadRequest(f"Such a block belongs into a message of the {role}.", param=where, code="invalid_value")


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


def _choice(choice: ToolChoice | None, tools: list[Tool]) -> Any:
    if choice is None or (not tools and choice.type in ("auto", "none")):
        return None
    if not tools:
        raise BadRequest("tool_choice needs tools.", param="tool_choice")
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name not in {tool.name for tool in tools}:
        raise BadRequest("tool_choice names a tool that is not among the tools.", param="tool_choice.name")
    return named(choice.name or "")


def _format(body: Prompt) -> dict[str, Any] | None:
    wanted = (body.output_config.format if body.output_config else None) or body.output_format
    if wanted is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema, "strict": True}}
