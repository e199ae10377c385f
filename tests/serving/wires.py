"""How three kinds of engine put one answer on the wire: ours, vLLM 0.32's, and an external endpoint of OpenAI's kind.

Every piece of text is `TOKENS_A_PIECE` tokens, so that tokens and chunks cannot be mistaken for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from serving.port import Replica
from tests.serving.fakes import CACHED_TOKENS, PROMPT_TOKENS, EngineCall, FakeEngine, replica

TOKENS_A_PIECE = 2
API_KEY = "sk-of-the-endpoint"
Json = dict[str, Any]


class Wire:
    """The embedded engine: full usage with every chunk."""

    def __init__(self, call: EngineCall) -> None:
        self.call = call
        self.tokens = 0
        self.reasoning = 0

    def usage(self) -> Json:
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": self.tokens,
            "total_tokens": PROMPT_TOKENS + self.tokens,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def choice(self, delta: Json, finish: str | None = None) -> Json:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}

    def chunk(self, *choices: Json) -> Json:
        head = {"id": "engine-id", "object": "chat.completion.chunk", "created": 1, "model": "engine-tiny"}
        return {**head, "choices": list(choices), "usage": self.usage()}

    async def begin(self) -> None:
        await self.call.head()
        await self.call.event(self.chunk(self.choice({"role": "assistant", "content": ""})))

    async def say(self, text: str) -> None:
        await self.piece({"content": text})

    async def think(self, text: str) -> None:
        self.reasoning += TOKENS_A_PIECE
        await self.piece({"reasoning_content": text})

    async def piece(self, delta: Json) -> None:
        self.tokens += TOKENS_A_PIECE
        await self.call.event(self.chunk(self.choice(delta)))

    async def end(self, reason: str = "stop") -> None:
        await self.call.event(self.chunk(self.choice({}, reason)))
        await self.call.event(self.chunk())
        await self.call.event(b"[DONE]")
        await self.call.end()

    async def report_error(self) -> None:
        """After the head only an event can tell."""
        await self.call.event({"error": {"message": "gone", "type": "server_error", "param": None, "code": 500}})
        await self.call.end()

    async def refuse(self, status: int) -> None:
        await self.call.head(status, "application/json")
        error = {"message": "no", "type": "invalid_request_error", "param": None, "code": "engine_code"}
        await self.call.raw(json.dumps({"error": error}).encode())
        await self.call.end()


class VllmWire(Wire):
    """vLLM's: usage with every chunk only where asked for, cached tokens only in the last; fields of its own."""

    def __init__(self, call: EngineCall) -> None:
        super().__init__(call)
        self.options: Json = call.body.get("stream_options") or {}

    def usage(self) -> Json:
        told = super().usage()
        del told["prompt_tokens_details"]
        return told

    def choice(self, delta: Json, finish: str | None = None) -> Json:
        ended = {"stop_reason": None} if finish else {}
        return super().choice(delta, finish) | ended | {"token_ids": None}

    def chunk(self, *choices: Json) -> Json:
        value = super().chunk(*choices) | {"prompt_token_ids": None, "kv_transfer_params": None}
        if not self.options.get("continuous_usage_stats"):
            del value["usage"]
        return value

    async def begin(self) -> None:
        await super().begin()
        await self.call.raw(b": ping\n\n")

    async def think(self, text: str) -> None:
        self.reasoning += TOKENS_A_PIECE
        await self.piece({"reasoning": text})

    async def end(self, reason: str = "stop") -> None:
        await self.call.event(self.chunk(self.choice({}, reason)))
        if self.options.get("include_usage"):
            await self.call.event(self.chunk() | {"usage": Wire.usage(self)})
        await self.call.event(b"[DONE]")
        await self.call.end()

    async def refuse(self, status: int) -> None:
        await self.call.head(status, "application/json")
        error = {"message": "no", "type": "BadRequestError", "param": None, "code": status}
        await self.call.raw(json.dumps({"error": error}).encode())
        await self.call.end()


class ExternalWire(Wire):
    """An endpoint of OpenAI's kind: usage at the very end or never, one piece unless streaming is asked."""

    def __init__(self, call: EngineCall) -> None:
        super().__init__(call)
        self.streams = bool(call.body.get("stream"))
        self.tells_usage = True
        self._message: Json = {"role": "assistant", "content": None, "refusal": None, "annotations": []}

    async def _event(self, value: Json) -> None:
        data = json.dumps(value | {"obfuscation": "aXz"}).encode()
        await self.call.raw(b"event: message\r\ndata: " + data + b"\r\n\r\n")

    def chunk(self, *choices: Json) -> Json:
        return super().chunk(*choices) | {"usage": None, "service_tier": "default", "system_fingerprint": "fp_1"}

    async def begin(self) -> None:
        if self.streams:
            await self.call.head()
            await self._event(self.chunk(self.choice({"role": "assistant", "content": "", "refusal": None})))

    async def piece(self, delta: Json) -> None:
        self.tokens += TOKENS_A_PIECE
        if self.streams:
            await self._event(self.chunk(self.choice(delta)))
        for name, value in delta.items():
            if name == "tool_calls":
                self._call(value)
            else:
                self._message[name] = (self._message.get(name) or "") + value

    async def end(self, reason: str = "stop") -> None:
        if not self.streams:
            await self._whole(reason)
            return
        await self._event(self.chunk(self.choice({}, reason)))
        if self.tells_usage:
            assert self.call.body["stream_options"] == {"include_usage": True}
            await self._event(self.chunk() | {"usage": self.usage()})
        await self.call.raw(b"data: [DONE]\r\n\r\n")
        await self.call.end()

    async def report_error(self) -> None:
        await self._event({"error": {"message": "gone", "type": "server_error", "param": None, "code": None}})
        await self.call.end()

    async def _whole(self, reason: str) -> None:
        choice = {"index": 0, "message": self._message, "logprobs": None, "finish_reason": reason}
        value = self.chunk(choice) | {"object": "chat.completion", "usage": self.usage()}
        if not self.tells_usage:
            del value["usage"]
        await self.call.head(kind="application/json")
        await self.call.raw(json.dumps(value).encode())
        await self.call.end()

    def _call(self, parts: list[Json]) -> None:
        calls: list[Json] = self._message.setdefault("tool_calls", [])
        for part in parts:
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": {"name": "f", "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


class TcpEngine(FakeEngine):
    """The same engine behind a TCP port, as strangers' endpoints are."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]


WIRES: dict[str, type[Wire]] = {"embedded": Wire, "vllm": VllmWire, "external": ExternalWire}


@contextlib.asynccontextmanager
async def engine_of(kind: str, root: Path) -> AsyncIterator[tuple[FakeEngine, Replica]]:
    """(engine, replica) of one kind, running."""
    engine = TcpEngine() if kind == "external" else FakeEngine(root / "wire.sock")
    await engine.start()
    facts: Json = {"engine": kind}
    if isinstance(engine, TcpEngine):
        url = f"http://127.0.0.1:{engine.port}"
        facts |= {"uds": None, "url": url, "addresses": ("127.0.0.1",), "api_key": API_KEY, "extras": frozenset()}
    made: Replica = replica(engine.path, **facts)
    try:
        yield engine, made
    finally:
        await engine.stop()
