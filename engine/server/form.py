"""What form a request wants its text in: response_format, vLLM's extras, tools. From fields to one Constraint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine import constraints
from engine.constraints import Constraint
from engine.errors import RequestError
from engine.tools.tool import ToolUse, grammar_of, tool_use

STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""The names that older clients of vLLM use for the members of `structured_outputs`."""
FIELDS = ("response_format", "structured_outputs", *GUIDED)

_MAKE: Mapping[str, Callable[[Any, str], Constraint]] = {
    "json": lambda schema, param: _of_schema(schema, param),
    "regex": constraints.of_regex,
    "choice": constraints.of_choice,
    "grammar": constraints.of_grammar,
    "json_object": lambda _, param: constraints.of_json_object(param),
}


def response_format(value: Any) -> dict[str, Any]:
    """Check the field's shape. Raises ValueError."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object"):
        return dict(value)
    if kind != "json_schema":
        raise ValueError("its type must be text, json_object or json_schema.")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        raise ValueError("json_schema must be an object with a schema.")
    return dict(value)


def structured_outputs(value: Any) -> dict[str, Any]:
    """Check the field's shape. Raises ValueError."""
    asked = {name: v for name, v in value.items() if v not in (None, False)} if isinstance(value, dict) else {}
    if len(asked) != 1 or not set(asked).issubset(STRUCTURED):
        raise ValueError(f"an object with one of {', '.join(STRUCTURED)} is expected.")
    ((name, inner),) = asked.items()
    return {name: structured(name)(inner)}


def structured(name: str) -> Callable[[Any], Any]:
    """The check of one member, under either of its names."""

    def check(value: Any) -> Any:
        if name == "choice":
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ValueError("a list of strings is expected.")
        elif name in ("regex", "grammar"):
            if not isinstance(value, str):
                raise ValueError("a string is expected.")
        elif name == "json_object":
            if value is not True:
                raise ValueError("true is expected.")
        elif not isinstance(value, (dict, bool, str)):
            raise ValueError("a JSON schema, or its text, is expected.")
        return value

    return check


def tools_of(fields: Mapping[str, Any]) -> ToolUse | None:
    """What may be called. Raises RequestError."""
    parallel = fields.get("parallel_tool_calls", True)
    return tool_use(fields.get("tools", []), fields.get("tool_choice"), parallel=parallel)


def wants_form(fields: Mapping[str, Any], use: ToolUse | None) -> bool:
    """True when `constraint_of` may have work to do."""
    return use is not None or not fields.keys().isdisjoint(FIELDS)


def constraint_of(fields: Mapping[str, Any], use: ToolUse | None) -> Constraint | None:
    """The one constraint that the fields ask for. Raises RequestError for two, or beyond the limits."""
    asked = [name for name in FIELDS if name in fields]
    if "response_format" in asked and fields["response_format"]["type"] == "text":
        asked.remove("response_format")
    if len(asked) > 1:
        raise RequestError(f"Invalid '{asked[1]}': '{asked[0]}' asks for another form already.", asked[1])
    if use is not None:
        return grammar_of(use, _answer_beside_tools(fields, asked, use))
    if not asked:
        return None
    name = asked[0]
    if name == "response_format":
        json_object = fields[name]["type"] == "json_object"
        member, value = ("json_object", True) if json_object else ("json", _schema(fields))
    elif name == "structured_outputs":
        ((member, value),) = fields[name].items()
    else:
        member, value = name.removeprefix("guided_"), fields[name]
    try:
        return _MAKE[member](value, name)
    except ValueError as error:  # such as text with half a surrogate pair
        raise RequestError(f"Invalid '{name}': {error}", name) from error


def _answer_beside_tools(fields: Mapping[str, Any], asked: list[str], use: ToolUse) -> Any:
    """The schema of an answer without a call; where a call is forced there is none."""
    if not asked or use.forced:
        return None
    if asked[0] != "response_format":
        raise RequestError(f"Invalid '{asked[0]}': it cannot be joined with 'tools'; response_format can.", asked[0])
    schema = {"type": "object"} if fields["response_format"]["type"] == "json_object" else _schema(fields)
    constraints.check_schema(schema, "response_format")
    return schema


def _schema(fields: Mapping[str, Any]) -> Any:
    return fields["response_format"]["json_schema"]["schema"]


def _of_schema(schema: Any, param: str) -> Constraint:
    if isinstance(schema, str):
        schema = constraints.read_json(schema, param)
    return constraints.of_json_schema(schema, param)
