"""The model's chat template, rendered in a sandbox with bounds on size and time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import TemplateError, UnsupportedModel
from engine.tools.prompt import with_parsed_arguments, without_tools
from engine.tools.tool import OPEN

MAX_TEMPLATE_CHARS = 256_000
MAX_OUTPUT_CHARS = 8_000_000
MAX_REPEAT = 1_000_000
TIME_LIMIT_S = 2.0


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with operators that could build huge values in one go bounded too."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("The chat template uses **, which is not allowed.")
        if operator == "%" and isinstance(left, str):
            raise TemplateError("The chat template formats with %, which is not allowed.")
        if operator == "*" and _repeats(left, right) > MAX_REPEAT:
            raise TemplateError("The chat template repeats a value too often.")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """Messages to prompt text. Thread-safe; rendering is bounded by size and time."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise UnsupportedModel(f"The chat template exceeds {MAX_TEMPLATE_CHARS} characters.")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
            variables = find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise UnsupportedModel(f"The chat template does not compile: {error}") from error
        # Calls are read, and guided, in one form only; a template that teaches another is treated as knowing none.
        self.takes_tools = "tools" in variables and OPEN in source and "<function=" not in source

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render with a generation prompt. Raises TemplateError."""
        plain = [normalise(message) for message in messages]
        context = {
            "messages": [*map(with_parsed_arguments, plain)] if self.takes_tools else without_tools(plain, tools),
            "tools": list(tools) if self.takes_tools and tools else None,
            "add_generation_prompt": True,
            **self._tokens,
        }
        try:
            with _deadline(TIME_LIMIT_S):
                return _join(self._template.generate(context))
        except TemplateError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise TemplateError(f"The chat template failed: {error}", "messages") from error
        except (MemoryError, OverflowError, ZeroDivisionError, AttributeError) as error:
            raise TemplateError(f"The chat template failed: {error}", "messages") from error


def normalise(message: Mapping[str, Any]) -> dict[str, Any]:
    """Make content a string: templates in the wild know neither null nor lists of parts."""
    content = message.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        text = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": text}


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Stop this thread's Python code after `seconds`.

    A loop without output never returns to its caller, so the line tracer checks the clock.
    """
    end = time.monotonic() + seconds

    def check(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > end:
            raise TemplateError(f"The chat template took longer than {seconds:g} s.", "messages")
        return check

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


def _join(pieces: Iterator[str]) -> str:
    parts, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            raise TemplateError("The chat template wrote too much.", "messages")
        parts.append(piece)
    return "".join(parts)


def _repeats(left: Any, right: Any) -> int:
    """Length of what `sequence * count` would build; 0 for plain numbers."""
    if isinstance(left, (str, bytes, list, tuple)) and isinstance(right, int):
        return len(left) * right
    if isinstance(right, (str, bytes, list, tuple)) and isinstance(left, int):
        return len(right) * left
    return 0


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message, "messages")


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
