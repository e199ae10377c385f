"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, by way of chat completions and the tokenizer."""

from __future__ import annotations

import functools

import msgspec

from serving.dialect import Dialect, Reply
from serving.endpoints.onepiece import OnePiece
from serving.endpoints.tokenize import NOTHING_USED, read_tokens
from serving.errors import GatewayError
from serving.exchange import Exchange
from serving.request import Request
from serving.translate.message import MessageNarrator, described
from serving.translate.messages import count, messages
from serving.translate.narrate import narrated


def greet(exchange: Exchange) -> None:
    """Errors in Anthropic's envelope, and the request's id in the header that Anthropic's clients read."""
    exchange.envelope = functools.partial(_envelope, request_id=exchange.arrival.id)
    exchange.extra.append((b"request-id", exchange.arrival.id.encode()))


def _envelope(error: GatewayError, request_id: str) -> bytes:
    return msgspec.json.encode(described(error, request_id))


def _counted(body: bytes, _request: Request) -> Reply:
    return Reply(usage=NOTHING_USED, body=msgspec.json.encode({"input_tokens": read_tokens(body).count}))


MESSAGES = Dialect(
    name="messages",
    path="/v1/messages",
    parse=messages,
    answer=narrated(MessageNarrator),
    upstream="/v1/chat/completions",
    greet=greet,
)
COUNT_TOKENS = Dialect(
    name="count_tokens",
    path="/v1/messages/count_tokens",
    parse=count,
    answer=OnePiece,
    upstream="/tokenize",
    generates=False,
    whole=_counted,
    greet=greet,
)
