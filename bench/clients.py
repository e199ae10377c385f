"""Streaming clients for measurements: raw HTTP with a stamp for every chunk, so that nothing hides behind an SDK."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Answer:
    """What one client saw. Seconds on its own monotonic clock."""

    status: int = 0
    request_id: str = ""
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    started: float = 0.0
    stamps: list[float] = field(default_factory=list)  # of every chunk with content
    done: bool = False  # [DONE] was seen
    sent: asyncio.Event = field(default_factory=asyncio.Event)  # the whole request is on the wire
    broken: str = ""  # the connection ended early, and how

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.started

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    key: str,
    prompt: str,
    hang_up_after: float | None = None,
    headers: dict[str, str] | None = None,
    **body: Any,
) -> Answer:
    """One streamed chat completion, with usage. `hang_up_after` seconds after it was sent the client leaves without a word."""
    answer = Answer(started=time.monotonic())
    request = {
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    auth = {"authorization": f"Bearer {key}", **(headers or {})}

    async def read() -> None:
        async with session.post(
            f"{url}/v1/chat/completions", json=request, headers=auth, trace_request_ctx=answer
        ) as response:
            answer.status = response.status
            answer.request_id = response.headers.get("x-request-id", "")
            if response.status != 200:
                answer.error = (await response.json())["error"]
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    _event(answer, line[6:].strip())

    reading = asyncio.create_task(read())
    if hang_up_after is not None:
        sent = asyncio.create_task(answer.sent.wait())
        await asyncio.wait({reading, sent}, return_when=asyncio.FIRST_COMPLETED)
        sent.cancel()
        await asyncio.wait({reading}, timeout=hang_up_after)
        if reading.cancel():
            answer.broken = "hung up"
    with contextlib.suppress(asyncio.CancelledError):
        try:
            await reading
        except aiohttp.ClientError as error:
            answer.broken = repr(error)
    return answer


def _event(answer: Answer, data: bytes) -> None:
    if data == b"[DONE]":
        answer.done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    for choice in chunk["choices"]:
        content = choice["delta"].get("content")
        if content:
            answer.text += content
            answer.stamps.append(time.monotonic())
        if choice["finish_reason"]:
            answer.finish_reason = choice["finish_reason"]


def session() -> aiohttp.ClientSession:
    """A session without a limit on connections and without a deadline of its own."""

    async def sent(_session: Any, context: Any, _params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.sent.set()

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(sent)
    return aiohttp.ClientSession(
        trace_configs=[trace],
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=600),
    )


def quantile(values: list[float], q: float) -> float:
    """The q-quantile by nearest rank; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
