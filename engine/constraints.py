"""What a caller may ask of a text's form, as grammar source for the compiler; bounded before anything is compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.errors import RequestError

MAX_SOURCE_BYTES = 65_536
MAX_DEPTH = 64
MAX_PROPERTIES = 512
MAX_ENUM_VALUES = 2_000
MAX_CHOICES = 1_000

WHITESPACE = r"( |\n {0,32})?"
"""Between the parts of JSON: one space, or a new line with its indentation. Unbounded, small models ramble in it."""

_DATA = frozenset(("enum", "const", "default", "examples"))
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar in the library's language, and the request's field it came from."""

    source: str
    param: str

    def __post_init__(self) -> None:
        refuse_beyond("bytes", len(self.source.encode()), 2 * MAX_SOURCE_BYTES, self.param)


def refuse_beyond(what: str, value: int, limit: int, param: str) -> None:
    """Raise RequestError that names the limit."""
    if value > limit:
        raise RequestError(f"Invalid '{param}': {value} {what}; the limit is {limit}.", param)


def of_json_object(param: str) -> Constraint:
    """Any JSON object."""
    return of_json_schema({"type": "object"}, param)


def of_json_schema(schema: Any, param: str) -> Constraint:
    """JSON that the schema accepts. Raises RequestError beyond the limits; keywords are the compiler's matter."""
    check_schema(schema, param)
    return Constraint(LLMatcher.grammar_from_json_schema(json.dumps(guided(schema))), param)


def read_json(text: str, param: str) -> Any:
    """A schema that came as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"Invalid '{param}': it is not valid JSON.", param) from error


def of_regex(pattern: str, param: str) -> Constraint:
    """Text that the whole pattern matches."""
    refuse_beyond("bytes", len(pattern.encode()), MAX_SOURCE_BYTES, param)
    return Constraint(LLMatcher.grammar_from_regex(pattern), param)


def of_choice(choices: list[str], param: str) -> Constraint:
    """One of several texts."""
    refuse_beyond("choices", len(choices), MAX_CHOICES, param)
    refuse_beyond("bytes", sum(len(choice.encode()) for choice in choices), MAX_SOURCE_BYTES, param)
    if not choices or not all(choices):
        raise RequestError(f"Invalid '{param}': a non-empty list of non-empty texts is expected.", param)
    return Constraint(LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, choices))), param)


def of_grammar(text: str, param: str) -> Constraint:
    """A context-free grammar, in Lark's or llama.cpp's (GBNF) notation."""
    refuse_beyond("bytes", len(text.encode()), MAX_SOURCE_BYTES, param)
    try:
        return Constraint(LLMatcher.grammar_from_lark(any_to_lark(text)), param)
    except Exception as error:  # the converter raises that very class, and others
        raise RequestError(f"Invalid '{param}': {str(error)[:200]}", param) from error


def quoted(text: str) -> str:
    """A literal in Lark's notation, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)


def guided(schema: Any, *, lenient: bool = False) -> Any:
    """The schema with the library's options inside; `lenient` drops what cannot be enforced instead of refusing."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    if schema is True:
        return {"x-guidance": options}
    return {**schema, "x-guidance": options} if isinstance(schema, dict) else schema


def check_schema(schema: Any, param: str) -> None:
    """Refuse a schema beyond the limits, or one whose objects could repeat a name to satisfy minProperties."""
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"Invalid '{param}': a schema is an object, true or false.", param)
    Census(param).visit(schema, 1)
    refuse_beyond("bytes", len(json.dumps(schema, ensure_ascii=False).encode()), MAX_SOURCE_BYTES, param)


class Census:
    """Counts what makes a schema expensive, over one walk."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._properties = 0
        self._values = 0

    def visit(self, node: Any, depth: int, *, data: bool = False, named: bool = False) -> None:
        """Count a schema, or the object that maps names to schemas (`named`), or plain values (`data`)."""
        self._refuse("levels of nesting", depth, MAX_DEPTH)
        if isinstance(node, dict):
            if not data and not named:
                self._check_keywords(node)
            for name, value in node.items():
                keyword = not data and not named
                self.visit(
                    value, depth + 1, data=data or (keyword and name in _DATA), named=keyword and name in _NAMED_SCHEMAS
                )
        elif isinstance(node, list):
            for value in node:
                self.visit(value, depth + 1, data=data)

    def _check_keywords(self, schema: dict[str, Any]) -> None:
        for name in ("properties", "patternProperties"):
            self._properties += _size(schema.get(name))
        self._values += _size(schema.get("enum"))
        self._refuse("properties", self._properties, MAX_PROPERTIES)
        self._refuse("enum values", self._values, MAX_ENUM_VALUES)
        if "x-guidance" in schema:
            raise RequestError(f"Invalid '{self._param}': the keyword x-guidance is not supported.", self._param)
        least = schema.get("minProperties")
        if isinstance(least, (int, float)) and least > 1 and schema.get("additionalProperties") is not False:
            raise RequestError(
                f"Invalid '{self._param}': the keyword minProperties needs additionalProperties: false.", self._param
            )

    def _refuse(self, what: str, value: int, limit: int) -> None:
        refuse_beyond(what, value, limit, self._param)


def explain(error: str, param: str) -> str:
    """The library's words for a caller: one line, keywords by name."""
    unsupported = re.search(r"Unimplemented keys: (\[.*?\])", error)
    if unsupported:
        names = _listed(json.loads(unsupported[1]))
        return f"Invalid '{param}': unsupported schema keyword: {names}."
    if "NoExtensionBias" in error:
        return f"Invalid '{param}': no finite text has this form; it only leads back to itself, or to nothing."
    told = " ".join(error.partition("<non-verbose/>")[0].split())[:300]
    return f"Invalid '{param}': {told}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (dict, list)) else 0
