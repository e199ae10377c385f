"""What differs between the endpoints that generate text: paths, names of objects, how a body is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from serving.metering import Usage
from serving.schemas import Ask

if TYPE_CHECKING:
    from serving.answer import Answer
    from serving.exchange import Exchange
    from serving.port import GatewaySettings
    from serving.request import Request


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint: how its body is read, where it goes at the engine, and how its answer and its errors are told."""

    name: str  # in records and labels
    path: str  # at the gateway
    parse: Callable[[bytes], Ask]
    answer: Callable[[Exchange, Request, GatewaySettings], Answer]
    upstream: str = ""  # at the engine; empty: the same path
    chat: bool = True  # the engine's chunks and choices are those of chat, not of plain completions
    generates: bool = True  # False: no text comes of it, the engine answers in one piece (embeddings)
    whole: Callable[[bytes, Request], Reply] | None = None  # reads an answer that an engine gives in one piece
    greet: Callable[[Exchange], None] | None = None  # sets what else responses carry, and how they tell errors


class Reply(msgspec.Struct, kw_only=True):
    """An engine's answer in one piece: what it is billed by, and what the client gets of it."""

    usage: Usage | None  # None: the engine told none
    body: bytes
    finish_reason: str = ""
    heard: int = 0  # choices with text, each at least one token
