"""From bytes to a typed body, and from msgspec's words to a 400 that names the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from serving.errors import BadRequest

IDENTITY_FIELDS = frozenset(
    (
        "cache_salt",
        "priority",
        "request_id",
        "kv_transfer_params",
        "vllm_xargs",
        "chat_template",
        "chat_template_kwargs",
        "prompt_logprobs",
    )
)

Body = TypeVar("Body")

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"(unknown|missing required) field `(?P<name>[^`]+)`")
_PART = re.compile(r"(content|system|output)\[\d+\]\.type$")


def decode(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    """Read a body; raises BadRequest naming the field."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise explained(error) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise BadRequest("The body is not valid JSON.", code="invalid_json") from None


def convert(value: Any, kind: type[Body], prefix: str) -> Body:
    """Read a part of a body that was left untyped; `prefix` is where it stands."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise explained(error, prefix) from None


def explained(error: msgspec.ValidationError, prefix: str = "") -> BadRequest:
    """The 400 for what msgspec found wrong."""
    match = _PATH.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    named = _NAMED.search(what)
    param = ".".join(part for part in (prefix, path, named["name"] if named else "") if part)
    if named and named[1] == "unknown":
        if param in IDENTITY_FIELDS:
            return BadRequest(
                f"`{param}` is set by the gateway and cannot be sent.",
                param=param,
                code="forbidden_parameter",
            )
        return BadRequest(f"Unknown parameter: `{param}`.", param=param, code="unknown_parameter")
    if named:
        return BadRequest(
            f"Missing required parameter: `{param}`.",
            param=param,
            code="missing_required_parameter",
        )
    if _PART.search(path):
        return BadRequest(f"{what}: only text content is supported.", param=param, code="unsupported_content")
    if not param:
        return BadRequest(f"The body must be a JSON object: {what}.", code="invalid_json")
    return BadRequest(f"Invalid value for `{param}`: {what}.", param=param, code="invalid_value")
