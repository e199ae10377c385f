"""Random JSON schemas within what the grammar library enforces, and checks that share no code with it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

WORDS = ("name", "city", "count", "tags", "état", "first name", "价格", "a", "id", "value", "kind", "note")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """An object schema, as response_format wants it."""
    return _object(rng, depth)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_string, _integer, _number, _boolean, _null, _enum, _const)
    nested = (_object, _array, _union) if depth > 0 else ()
    return rng.choice(leaves + nested)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _any(rng, depth - 1) for name in names}}
    schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    extra = rng.choice(("closed", "closed", "open", "typed"))
    if extra == "closed":
        schema["additionalProperties"] = False
    elif extra == "typed":
        schema["additionalProperties"] = _any(rng, 0)
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "items": _any(rng, depth - 1), "minItems": least}
    if rng.random() < 0.7:
        schema["maxItems"] = least + rng.randint(0, 3)
    if rng.random() < 0.2:
        schema["prefixItems"] = [_any(rng, 0)]
    return schema


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"maxLength": rng.randint(0, 20)},
        {"minLength": 2, "maxLength": 9},
        {"pattern": "^[A-Z]{2}-[0-9]{3}$"},
        {"format": "date"},
        {"format": "uuid"},
    )
    return {"type": "string"} | rng.choice(kinds)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    kinds = ({}, {"minimum": low}, {"minimum": low, "maximum": low + 50}, {"exclusiveMaximum": low}, {"multipleOf": 7})
    return {"type": "integer"} | rng.choice(kinds)


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number"} | rng.choice(({}, {"minimum": 0, "maximum": 1}, {"exclusiveMinimum": -2.5}))


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("null", ["string", "null"]))}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "vert", 'a "quoted" \\ one', 5, 2.5, True, None, "绿"], rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(("x", 17, False, {"a": [1, None]}))}


def accepts(schema: Any, text: str) -> bool:
    """Whether a text is JSON that the schema accepts, as the jsonschema package sees it."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def is_json_prefix(text: str) -> bool:
    """Whether a text can still become JSON: one pass with a stack of what is open, by the grammar of RFC 8259."""
    return Prefix(text).holds()


class Prefix:
    """A small recursive-descent reader that forgives only the end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def holds(self) -> bool:
        """Read one value; running out of text is fine, anything left over is not."""
        try:
            self._value()
            self._space()
        except IndexError:
            return True
        except ValueError:
            return False
        return self._at == len(self._text)

    def _peek(self) -> str:
        return self._text[self._at]

    def _expect(self, word: str) -> None:
        for char in word:
            if self._peek() != char:
                raise ValueError
            self._at += 1

    def _space(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
            self._at += 1

    def _value(self) -> None:
        self._space()
        first = self._peek()
        if first == "{":
            self._members("{", "}", self._pair)
        elif first == "[":
            self._members("[", "]", self._value)
        elif first == '"':
            self._string()
        elif first in "tfn":
            self._expect({"t": "true", "f": "false", "n": "null"}[first])
        else:
            self._number()

    def _members(self, start: str, end: str, member: Any) -> None:
        self._expect(start)
        self._space()
        if self._peek() == end:
            self._at += 1
            return
        while True:
            member()
            self._space()
            if self._peek() == end:
                self._at += 1
                return
            self._expect(",")

    def _pair(self) -> None:
        self._space()
        self._string()
        self._space()
        self._expect(":")
        self._value()

    def _string(self) -> None:
        self._expect('"')
        while (char := self._peek()) != '"':
            if char < " ":
                raise ValueError
            self._at += 1
            if char == "\\":
                self._escape()
        self._at += 1

    def _escape(self) -> None:
        kind = self._peek()
        self._at += 1
        if kind == "u":
            for _ in range(4):
                int(self._peek(), 16)
                self._at += 1
        elif kind not in '"\\/bfnrt':
            raise ValueError

    def _number(self) -> None:
        if self._peek() == "-":
            self._at += 1
        if self._peek() == "0":
            self._at += 1
        else:
            self._digits()
        if self._left() and self._peek() == ".":
            self._at += 1
            self._digits()
        if self._left() and self._peek() in "eE":
            self._at += 1
            if self._peek() in "+-":
                self._at += 1
            self._digits()

    def _digits(self) -> None:
        if self._peek() not in "0123456789":
            raise ValueError
        while self._left() and self._peek() in "0123456789":
            self._at += 1

    def _left(self) -> bool:
        return self._at < len(self._text)
