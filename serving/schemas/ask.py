"""The one form that the pipeline works on, and how many tokens a prompt may have before anybody has counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

EXTRAS = frozenset(
    ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "structured_outputs")
)
"""What OpenAI does not document: it reaches an engine whose adapter lists it as safe for callers."""

_BYTES_PER_TOKEN = 4  # for estimates only; nothing is billed or counted by it
_FRAME = 16  # tokens around one message: its role and the marks of its begin and end
_MARGIN = 64  # tokens around a whole prompt


class Ask(msgspec.Struct, kw_only=True):
    """A validated request, whichever endpoint it came by."""

    model: str
    stream: bool
    include_usage: bool
    upstream: dict[str, Any]  # what reaches the engine; identity fields are added at dispatch
    params: dict[str, Any]  # the sampling part of it, for the record: never content
    stops: tuple[str, ...] = ()
    choices: int = 1
    max_tokens: int | None = None  # 0: nothing is generated
    prompt_estimate: int = 0  # tokens of the longest prompt, from the length of the text
    prompt_bound: int = 0  # tokens at most, all prompts together, before what the chat template adds of its own
    user: str | None = None
    told: Any = None  # what the answer's form depends on besides; its own endpoint knows what it is


def size(text: str) -> int:
    """UTF-8 bytes of a text: no token of a byte-level or SentencePiece vocabulary is shorter than one."""
    return len(text) if text.isascii() else len(text.encode())


def json_size(value: Any) -> int:
    """Bytes of a value as JSON, written with a space behind each comma and colon as templates do."""
    if not value:
        return 0
    written = msgspec.json.encode(value)
    return len(written) + written.count(b",") + written.count(b":")


def bound(byte_count: int, frames: int) -> int:
    """Tokens at most of `byte_count` bytes in `frames` messages or prompts."""
    return byte_count + _FRAME * frames + _MARGIN


def estimate(characters: int) -> int:
    """Tokens, roughly."""
    return -(-characters // _BYTES_PER_TOKEN)


def summarised(upstream: dict[str, Any], names: Iterable[str], content: Iterable[str]) -> dict[str, Any]:
    """What a record keeps of a body: of fields in `names` how many or which kind, of those in `content` nothing."""
    return {key: _summary(value) if key in names else value for key, value in upstream.items() if key not in content}


def _summary(value: Any) -> Any:
    """What a record may keep of a field whose value is the caller's content: never a schema, a name or an argument."""
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return value["type"][:32]
    return len(value) if isinstance(value, (list, dict)) else True
