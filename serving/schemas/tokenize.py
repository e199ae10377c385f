"""The bodies of POST /v1/tokenize and /v1/detokenize, which vLLM has defined."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from serving.errors import BadRequest
from serving.schemas.ask import Ask
from serving.schemas.chat import Message
from serving.schemas.decode import decode
from serving.schemas.sampling import ModelName, TokenId, picked


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either a prompt or messages."""

    model: ModelName
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: ModelName
    tokens: list[TokenId]


_FORWARDED = ("prompt", "tools", "add_special_tokens", "add_generation_prompt", "return_token_strs")
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


def tokenize(raw: bytes) -> Ask:
    """Read a text or a chat to count; raises BadRequest naming the field."""
    body = decode(_tokenize, raw)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Send either `prompt` or `messages`.", param="prompt")
    upstream = picked(body, _FORWARDED)
    if body.messages is not None:
        upstream["messages"] = [message.forwarded() for message in body.messages]
    return _ask(body.model, upstream)


def detokenize(raw: bytes) -> Ask:
    """Read token ids to spell; raises BadRequest naming the field."""
    body = decode(_detokenize, raw)
    return _ask(body.model, {"tokens": body.tokens})


def _ask(model: str, upstream: dict[str, Any]) -> Ask:
    """No model runs for it: it takes requests from a limit and no tokens."""
    return Ask(model=model, stream=False, include_usage=False, upstream=upstream, params={}, max_tokens=0)
