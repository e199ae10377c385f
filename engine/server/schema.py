"""Request bodies, checked field by field: what is unknown or out of range is a 400 naming it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.errors import RequestError
from engine.server import form
from engine.server.http import safe_id
from engine.tools.tool import ToolUse, read_tools
from engine.types import SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_TOKEN_IDS = 1024
_TOKEN_ID = re.compile(r"[0-9]{1,10}")  # int() also reads "1_0", " 7", other scripts' digits

Check = Callable[[Any], Any]


@dataclass(slots=True)
class CompletionRequest:
    """A parsed request. Exactly one of `messages` and `prompt` is set."""

    model: str
    messages: list[dict[str, Any]] | None
    prompt: str | list[int] | None
    fields: dict[str, Any] = field(default_factory=dict)
    tool_use: ToolUse | None = None

    @property
    def chat(self) -> bool:
        """True for /v1/chat/completions."""
        return self.messages is not None

    @property
    def stream(self) -> bool:
        """True when the answer is sent as events."""
        return bool(self.fields.get("stream", False))

    @property
    def include_usage(self) -> bool:
        """True when a last chunk shall carry the usage."""
        return bool(self.fields.get("stream_options", {}).get("include_usage", False))

    @property
    def continuous_usage(self) -> bool:
        """True when every chunk shall carry the usage so far."""
        options = self.fields.get("stream_options", {})
        return self.include_usage and bool(options.get("continuous_usage_stats", False))

    @property
    def choices(self) -> int:
        """How many answers are wanted (`n`)."""
        return int(self.fields.get("n", 1))

    @property
    def max_tokens(self) -> int | None:
        """The newer name wins; None means as many as fit."""
        value = self.fields.get("max_completion_tokens", self.fields.get("max_tokens"))
        return 16 if value is None and not self.chat else value

    @property
    def top_logprobs(self) -> int | None:
        """How many alternatives to report, or None for no log-probabilities at all."""
        asked = self.fields.get("logprobs")
        if not self.chat:
            return None if asked is None else int(asked)
        return int(self.fields.get("top_logprobs", 0)) if asked else None

    def sampling(self, max_tokens: int, end_ids: frozenset[int], index: int) -> SamplingParams:
        """Parameters of choice `index`; without a seed every choice gets its own."""
        get = self.fields.get
        seed = get("seed")
        own_ids = frozenset(get("stop_token_ids", ()))
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=get("temperature", 1.0),
            top_p=get("top_p", 1.0),
            top_k=max(get("top_k", 0), 0),
            min_p=get("min_p", 0.0),
            repetition_penalty=get("repetition_penalty", 1.0),
            presence_penalty=get("presence_penalty", 0.0),
            frequency_penalty=get("frequency_penalty", 0.0),
            seed=secrets.randbits(63) if seed is None else seed + index,
            min_tokens=get("min_tokens", 0),
            stop=get("stop", ()),
            stop_token_ids=own_ids if get("ignore_eos") else own_ids | end_ids,
            logit_bias=get("logit_bias", ()),
            top_logprobs=self.top_logprobs,
        )


def parse(data: bytes, *, chat: bool) -> CompletionRequest:
    """Check a body. Raises RequestError with the offending field as `param`."""
    fields = read_fields(data, CHAT if chat else TEXT, ("model", "messages" if chat else "prompt"))
    _check_together(fields, chat=chat)
    use = form.tools_of(fields)
    model, messages, prompt = (fields.pop(name, None) for name in ("model", "messages", "prompt"))
    return CompletionRequest(model, messages, prompt, fields, use)


def read_fields(data: bytes, checks: Mapping[str, Check], required: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a body by name, those that are null left out. Raises RequestError with the field as `param`."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    fields = {name: _checked(checks, name, v) for name, v in body.items() if v is not None}
    for name in required:
        if name not in fields:
            raise RequestError(f"The field '{name}' is required.", name)
    return fields


def _checked(checks: Mapping[str, Check], name: str, value: Any) -> Any:
    check = checks.get(name)
    if check is None:
        raise RequestError(f"Unknown field '{name}'.", name, "unknown_parameter")
    try:
        return check(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"Invalid '{name}': {error}", name) from error


def _check_together(fields: dict[str, Any], *, chat: bool) -> None:
    """Rules over more than one field."""
    if "stream_options" in fields and not fields.get("stream"):
        raise RequestError("'stream_options' needs stream: true.", "stream_options")
    if chat and "top_logprobs" in fields and not fields.get("logprobs"):
        raise RequestError("'top_logprobs' needs logprobs: true.", "top_logprobs")
    limit = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if limit is not None and fields.get("min_tokens", 0) > limit:
        raise RequestError("'min_tokens' exceeds max_tokens.", "min_tokens")


def _number(low: float, high: float, *, open_low: bool = False) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("a number is expected.")
        # Compared before it becomes a float: an integer may be too large for one. Not a number is in no range.
        if not low <= value <= high or (open_low and value == low):
            raise ValueError(f"{value} is not in {'(' if open_low else '['}{low}, {high}].")
        return float(value)

    return check


def integer(low: int, high: int = 2**63 - 1) -> Check:
    """A check of whole numbers, both bounds included."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("an integer is expected.")
        if not low <= value <= high:
            raise ValueError(f"{value} is not in [{low}, {high}].")
        return value

    return check


def _kind(*kinds: type, name: str) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise ValueError(f"{name} is expected.")
        return value

    return check


def _only(*allowed: Any, why: str) -> Check:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(why)
        return value

    return check


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError(f"a string or a list of at most {MAX_STOPS} strings is expected.")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise ValueError(f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters.")
    return tuple(stops)


def token_ids(value: Any) -> list[int]:
    """A check of lists of ids; whether the model has them is asked elsewhere."""
    ids = isinstance(value, list) and all(type(id) is int and id >= 0 for id in value)
    if not ids:
        raise ValueError("a list of token ids is expected.")
    return list(value)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise ValueError("this engine takes one prompt per request.")
        value = value[0]
    if isinstance(value, str):
        return value
    return token_ids(value)


def _stop_token_ids(value: Any) -> list[int]:
    if isinstance(value, list) and len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"at most {MAX_TOKEN_IDS:,} token ids are expected.")
    return token_ids(value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MAX_TOKEN_IDS:
        raise ValueError("an object of at most 1,024 token ids is expected.")
    if not all(_TOKEN_ID.fullmatch(id) for id in value):
        raise ValueError("its names must be token ids.")
    in_range = _number(-100, 100)
    return tuple((int(id), in_range(bias)) for id, bias in value.items())


def _stream_options(value: Any) -> dict[str, bool]:
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if not isinstance(value, dict) or not known.issuperset(value):
        raise ValueError(f"an object with only {', '.join(sorted(known))} is expected.")
    if not all(isinstance(flag, bool) for flag in value.values()):
        raise ValueError("its members are true or false.")
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("a non-empty list is expected.")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"message {index} needs a role out of {', '.join(ROLES)}.")
        _content(index, message.get("content"))
        _calls(index, message.get("tool_calls"))
    return value


def _content(index: int, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ValueError(f"the content of message {index} must be null, text or a list of parts.")
    for part in content:
        ok = isinstance(part, dict) and part.get("type") == "text"
        if not ok or not isinstance(part.get("text"), str):
            raise ValueError(f"message {index}: only parts {{'type': 'text', 'text': …}} work.")


def _calls(index: int, calls: Any) -> None:
    if calls is None:
        return
    good = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    for call in calls if good else ():
        function = call.get("function")
        texts = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None,)
        good = good and all(isinstance(text, str) for text in texts)
    if not good:
        raise ValueError(f"the tool_calls of message {index} need a function with name and arguments, both text.")


def _request_id(value: Any) -> str:
    if not isinstance(value, str) or safe_id(value) is None:
        raise ValueError("1 to 128 letters, digits or . _ : - are expected.")
    return value


flag = _kind(bool, name="true or false")
_TEXT = _kind(str, name="a string")
_NOT_YET = "this engine cannot do it yet."

COMMON: dict[str, Check] = {
    "model": _TEXT,
    "stream": flag,
    "stream_options": _stream_options,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, open_low=True),
    "max_tokens": integer(1),
    "stop": _stop,
    "seed": integer(-(2**63)),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": _logit_bias,
    "n": integer(1, MAX_CHOICES),
    "user": _TEXT,
    "metadata": _kind(dict, name="an object"),
    "store": flag,
    "service_tier": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
    "top_k": integer(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, 10, open_low=True),
    "min_tokens": integer(0),
    "ignore_eos": flag,
    "stop_token_ids": _stop_token_ids,
    "cache_salt": _TEXT,
    "priority": integer(-(2**31), 2**31),
    "request_id": _request_id,
    "deadline_ms": integer(1, 86_400_000),
    "structured_outputs": form.structured_outputs,
    **{name: form.structured(name.removeprefix("guided_")) for name in form.GUIDED},
}
CHAT: dict[str, Check] = COMMON | {
    "messages": _messages,
    "max_completion_tokens": integer(1),
    "logprobs": flag,
    "top_logprobs": integer(0, 20),
    "response_format": form.response_format,
    "tools": read_tools,
    "tool_choice": _kind(str, dict, name="none, auto, required or a function"),
    "functions": _only([], why="send 'tools' instead."),
    "function_call": _only("none", "auto", why="send 'tool_choice' instead."),
    "parallel_tool_calls": flag,
    "modalities": _only(["text"], why="only text comes out of this engine."),
}
TEXT: dict[str, Check] = COMMON | {
    "prompt": _prompt,
    "logprobs": integer(0, 5),
    "echo": _only(False, why=_NOT_YET),
    "best_of": _only(1, why=_NOT_YET),
    "suffix": _only("", why=_NOT_YET),
}
