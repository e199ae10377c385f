from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.fakes import KEY, MODEL, Stack, running


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: a Unix socket's may hold 107 characters."""
    with tempfile.TemporaryDirectory(prefix="fl-") as path:
        yield Path(path)


@pytest.fixture
async def stack(root: Path) -> AsyncIterator[Stack]:
    async with running(root) as stack:
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(stack) as client:
        yield client


@contextlib.asynccontextmanager
async def connected(stack: Stack, key: str | None = KEY) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # verify=False: plain HTTP here, and loading the certificates takes longer than most tests
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=10, verify=False) as client:
        yield client


def chat(**changes: Any) -> dict[str, Any]:
    """A plain chat request."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Capital of France?"}],
    } | changes


def events(body: str) -> list[Any]:
    """The decoded events of a stream; `[DONE]` as that string."""
    found = [block.removeprefix("data: ") for block in body.split("\n\n") if block]
    return [item if item == "[DONE]" else json.loads(item) for item in found]


def text_of(stream: list[Any], index: int = 0) -> str:
    """What a client would have put together."""
    parts = [
        choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        for event in stream
        if isinstance(event, dict)
        for choice in event.get("choices", ())
        if choice["index"] == index
    ]
    return "".join(parts)
