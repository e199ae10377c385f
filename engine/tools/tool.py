"""The functions of a request, checked, and the grammar of what the model may say with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.constraints import MAX_SOURCE_BYTES, Constraint, check_schema, guided, quoted, refuse_beyond
from engine.errors import RequestError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
MAX_CALLS = 16
MAX_TOOLS_BYTES = 2 * MAX_SOURCE_BYTES
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KEYS = frozenset(("name", "description", "parameters", "strict"))


@dataclass(frozen=True, slots=True)
class Tool:
    """One function; `definition` is as the caller sent it."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    definition: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What may be called, and whether something must be."""

    tools: tuple[Tool, ...]
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """True when the answer is nothing but calls."""
        return self.required or self.named is not None

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """As the caller sent them."""
        return [tool.definition for tool in self.tools]


def tool_use(tools: list[Tool], choice: Any, *, parallel: bool) -> ToolUse | None:
    """Join `tools` and `tool_choice`; None when nothing may be called. Raises RequestError."""
    if isinstance(choice, dict):
        name = _named(choice)
        if name not in (tool.name for tool in tools):
            raise RequestError(f"Invalid 'tool_choice': no function of 'tools' is named {name[:64]!r}.", "tool_choice")
        return ToolUse(tuple(tools), named=name, parallel=False)
    if choice not in (None, "none", "auto", "required"):
        raise RequestError("Invalid 'tool_choice': none, auto, required or a function is expected.", "tool_choice")
    if choice == "required" and not tools:
        raise RequestError("Invalid 'tool_choice': it needs 'tools'.", "tool_choice")
    if choice == "none" or not tools:
        return None
    return ToolUse(tuple(tools), required=choice == "required", parallel=parallel)


def read_tools(value: Any) -> list[Tool]:
    """Check `tools`. Raises ValueError, or RequestError beyond a limit."""
    if not isinstance(value, list):
        raise ValueError("a list is expected.")
    refuse_beyond("tools", len(value), MAX_TOOLS, "tools")
    tools = [_tool(index, item) for index, item in enumerate(value)]
    refuse_beyond("bytes", len(json.dumps(value, ensure_ascii=False).encode()), MAX_TOOLS_BYTES, "tools")
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("two functions have the same name.")
    return tools


def grammar_of(use: ToolUse, answer: Any = None) -> Constraint:
    """Calls, or, where none is forced, free text up to one; `answer`: a schema that text without a call must meet.

    Where no call is forced, keywords that cannot be enforced are left out, unless the function is strict.
    """
    tools = [tool for tool in use.tools if use.named in (None, tool.name)]
    more = f" more{{0,{MAX_CALLS - 1}}}" if use.parallel else ""
    rules = []
    if use.forced:
        rules.append(f"start: {quoted(OPEN)} call{more}")
    elif answer is not None:
        rules.append(f"start: {quoted(OPEN)} call{more} | answer\nanswer: %json {json.dumps(guided(answer))}")
    else:
        rules.append(f"start: opened call{more} | text\nopened[lazy]: /(?s:.*){OPEN}/\ntext: /(?s:.*)/")
    rules += [f"more: GAP? {quoted(OPEN)} call", f"call: GAP? body GAP? {quoted(CLOSE)}", "GAP: /[ \\n]{1,2}/"]
    rules.append("body: " + " | ".join(f"f{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        head = quoted(f'{{"name": "{tool.name}", "arguments": ')
        schema = guided(tool.parameters, lenient=not (use.forced or tool.strict))
        rules.append(f'f{index}: {head} %json {json.dumps(schema)} "}}"')
    return Constraint("\n".join(rules), "tools")


def _named(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            "Invalid 'tool_choice': {'type': 'function', 'function': {'name': …}} is expected.", "tool_choice"
        )
    return name


def _tool(index: int, item: Any) -> Tool:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or item.get("type") != "function":
        raise ValueError(f"tool {index} must be {{'type': 'function', 'function': {{…}}}}.")
    if unknown := [key for key in function if key not in _KEYS]:
        raise ValueError(f"the function of tool {index} has an unknown field {unknown[0][:64]!r}.")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"tool {index} needs a name of 1 to 64 letters, digits, _ or -.")
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise ValueError(f"the description of tool {index} must be a string.")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise ValueError(f"strict of tool {index} must be true or false.")
    parameters = NO_PARAMETERS if parameters is None else parameters
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ValueError(f"the parameters of tool {index} must be a schema of type object.")
    check_schema(parameters, "tools")
    return Tool(name, {"type": "object", **parameters}, bool(function.get("strict")), item)
