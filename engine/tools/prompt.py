"""Tools for chat templates that know none: told in the system message, calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.tools.tool import CLOSE, OPEN

INTRODUCTION = f"""\
You can call functions. Each line below describes one, as JSON:
<tools>
%s
</tools>
To call a function, answer with its name and its arguments in these tags and nothing after them:
{OPEN}
{{"name": "function name", "arguments": {{"argument": "value"}}}}
{CLOSE}
The result comes back in <tool_response> tags. Call a function only when it helps; otherwise answer directly."""


def without_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Messages (their content is text) for a template without tools: everything about them becomes text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] in ("tool", "function"):
            _add_result(plain, str(message["content"]))
        elif message.get("tool_calls"):
            calls = "\n".join(map(_written, message["tool_calls"]))
            content = f"{message['content']}\n{calls}" if message["content"] else calls
            plain.append({"role": message["role"], "content": content})
        else:
            plain.append(dict(message))
    return _introduced(plain, tools) if tools else plain


def with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates that know tools write arguments as JSON themselves, so they must get an object, not its text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed(call) for call in calls]} if calls else dict(message)


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}\n{CLOSE}'


def _add_result(plain: list[dict[str, Any]], content: str) -> None:
    """Results come from the user; those of one turn share a message, as many templates want roles to alternate."""
    text = f"<tool_response>\n{content}\n</tool_response>"
    if plain and plain[-1].get("results"):
        plain[-1]["content"] += "\n" + text
    else:
        plain.append({"role": "user", "content": text, "results": True})


def _introduced(plain: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    told = INTRODUCTION % "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]
