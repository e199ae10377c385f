"""Clients in every dialect that generates text, and what each knows of its request afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

LEAVES = 0.1  # of the clients, at some moment
TURN = [{"role": "user", "content": "hi"}]


@dataclass
class Told:
    """What one client knows of its request."""

    path: str = ""
    stream: bool = False
    request_id: str = ""
    status: int = 0
    pieces: int = 0  # of text, as they came; an answer in one piece counts as one
    billed: int | None = None  # completion tokens, as the answer itself told
    hung: bool = False  # nothing came for longer than any deadline allows


@dataclass(frozen=True)
class Way:
    """How to ask in one dialect, and how to read an event and a whole answer."""

    path: str
    body: dict[str, Any]
    event: Callable[[Told, dict[str, Any]], None]
    whole: Callable[[Told, dict[str, Any]], None]
    streaming: dict[str, Any]


def _choices(told: Told, chunk: dict[str, Any]) -> None:
    """Of a chat or of a completion."""
    if chunk.get("usage"):
        told.billed = chunk["usage"]["completion_tokens"]
    for choice in chunk.get("choices", ()):
        told.pieces += bool(choice.get("text") or choice.get("delta", choice.get("message", {})).get("content"))


def _message_event(told: Told, event: dict[str, Any]) -> None:
    if event["type"] == "content_block_delta":
        told.pieces += 1
    elif event["type"] == "message_delta":
        told.billed = event["usage"]["output_tokens"]


def _message(told: Told, body: dict[str, Any]) -> None:
    told.pieces = bool(body["content"][0]["text"])
    told.billed = body["usage"]["output_tokens"]


def _response_event(told: Told, event: dict[str, Any]) -> None:
    if event["type"] == "response.output_text.delta":
        told.pieces += 1
    elif event["type"] in ("response.completed", "response.incomplete"):
        told.billed = event["response"]["usage"]["output_tokens"]


def _response(told: Told, body: dict[str, Any]) -> None:
    told.pieces = bool(body["output"][0]["content"][0]["text"])
    told.billed = body["usage"]["output_tokens"]


_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
WAYS = (
    Way("/v1/chat/completions", {"messages": TURN, "max_tokens": 8}, _choices, _choices, _USAGE),
    Way("/v1/completions", {"prompt": "hi", "max_tokens": 8}, _choices, _choices, _USAGE),
    Way("/v1/messages", {"messages": TURN, "max_tokens": 8}, _message_event, _message, {"stream": True}),
    Way("/v1/responses", {"input": "hi", "max_output_tokens": 16}, _response_event, _response, {"stream": True}),
)


async def ask(session: aiohttp.ClientSession, url: str, key: str, model: str, source: random.Random) -> Told:
    """One request in some way, streamed or not; some clients hang up at some moment."""
    way, stream = source.choice(WAYS), source.random() < 0.6
    told = Told(way.path, stream)
    body = {"model": model, **way.body, **(way.streaming if stream else {})}

    async def read() -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with session.post(url + way.path, json=body, headers=headers) as response:
            told.status = response.status
            told.request_id = response.headers.get("x-request-id", "")
            if response.status != 200:
                await response.read()
            elif not stream:
                way.whole(told, json.loads(await response.read()))
            else:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        way.event(told, json.loads(line[6:]))

    reading = asyncio.create_task(read())
    if source.random() < LEAVES:
        await asyncio.wait({reading}, timeout=source.uniform(0, 0.04))
        reading.cancel()
    try:
        await reading
    except TimeoutError:
        told.hung = True
    except (aiohttp.ClientError, asyncio.CancelledError):
        told.billed = None
    return told
