"""A stand-in for an external endpoint that misbehaves when it is told to, in every way that real ones do."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from bench.upstream import STREAM, Upstream, answered, framed, is_chat, one_piece, piece, streamed, whole

HANG_S = 10.0  # longer than any deadline of the route
PACED = 0.25  # of all ordinary streams: piece by piece, so that somebody can leave in the middle
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 200\r\n\r\n"
Fault = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class Faulty(Upstream):
    """`next` names the fault that the next request meets; it is counted in `happened` when one did."""

    def __init__(self, seed: int) -> None:
        super().__init__(delay_s=0.005)
        self.next = ""
        self.happened: Counter[str] = Counter()
        self._source = random.Random(seed)
        self.kinds: dict[str, Fault] = {
            "hang": self._hang,
            "stall_in_the_middle": self._stall,
            "die_at_once": self._die,
            "die_in_the_middle": self._die_in_the_middle,
            "status_500": self._status(500),
            "status_503": self._status(503),
            "status_429": self._status(429),
            "nonsense": self._nonsense,
            "split_characters": self._split,
            "no_usage": self._no_usage,
        }

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        kind, self.next = self.next, ""
        if not kind:
            await super().answer(body, writer)
            return
        self.happened[kind] += 1
        await self.kinds[kind](body, writer)

    async def write(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not body.get("stream") or self._source.random() > PACED:
            await super().write(body, writer)
            return
        for part in streamed(is_chat(body)):
            await asyncio.sleep(0.003)
            writer.write(part)
            await writer.drain()

    async def restart(self) -> None:
        """As if killed and started again: every connection is reset, and for half a second nobody listens."""
        await self.stop()
        await asyncio.sleep(0.5)
        await self.start()
        self.happened["kill_upstream"] += 1

    async def _hang(self, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for _ in range(int(HANG_S / 0.1)):
            await asyncio.sleep(0.1)
            if self.left(writer):
                break
        raise ConnectionResetError

    async def _stall(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Half an answer, and then nothing."""
        await self._begin(body, writer)
        await self._hang(body, writer)

    async def _die(self, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        raise ConnectionResetError

    async def _die_in_the_middle(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await self._begin(body, writer)
        await asyncio.sleep(0.02)
        await self._die(body, writer)

    async def _begin(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chat = is_chat(body)
        writer.write(STREAM + piece("some", None, chat) if body.get("stream") else HEAD + b'{"id":"x","choices":[')
        await writer.drain()

    def _status(self, status: int) -> Fault:
        said = b'{"error":{"message":"no","type":"x","param":null,"code":null}}'

        async def answer(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(said), said))

        return answer

    async def _nonsense(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not body.get("stream"):
            writer.write(HEAD.replace(b"200\r\n\r\n", b"9\r\n\r\n") + b"{not json")
            return
        begun = piece("some", None, is_chat(body)) if self._source.random() < 0.5 else b""
        writer.write(STREAM + begun + framed(b"data: {not json\n\n") + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def _split(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """A character's bytes in several reads, as bytes on a wire are cut anywhere."""
        if not body.get("stream"):
            await self._cut(b"".join(whole(is_chat(body))), writer)
            return
        head, *_, end, usage, done = streamed(is_chat(body))
        writer.write(head)
        payload = piece("naïve 日本", None, is_chat(body)).split(b"\r\n", 1)[1][:-2]
        await self._cut(b"".join(framed(payload[at : at + 3]) for at in range(0, len(payload), 3)), writer)
        writer.write(end + usage + done)

    async def _cut(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(data), 11):
            await asyncio.sleep(0)
            writer.write(data[at : at + 11])
            await writer.drain()

    async def _no_usage(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chat = is_chat(body)
        without = [part for part in streamed(chat) if b'"usage"' not in part]
        writer.write(b"".join(without) if body.get("stream") else one_piece(answered(chat)))
