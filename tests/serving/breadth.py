"""A fake engine that answers whatever the gateway asks of it: chats with or without tools, vectors, tokens."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from tests.serving.fakes import EngineCall

VECTORS = [[0.25, -0.5, 1.0], [0.5, 0.0, -1.0]]
WEATHER = '{"city":"Łódź","days":2}'


async def whole(call: EngineCall, value: Any, status: int = 200) -> None:
    """An answer in one piece."""
    await call.head(status, "application/json")
    await call.raw(json.dumps(value).encode())
    await call.end()


async def every_path(call: EngineCall) -> None:
    """A well-behaved engine."""
    if call.path == "/v1/embeddings":
        await embed(call)
    elif call.path == "/tokenize":
        await whole(call, {"count": 3, "max_model_len": 8192, "tokens": [1, 2, 3], "extra": "dropped"})
    elif call.path == "/detokenize":
        await whole(call, {"prompt": "spelled"})
    elif call.body.get("tools") and call.body.get("n", 1) == 1:
        await call_a_tool(call)
    elif choices_of(call) > 1:
        await say_all(call)
    else:
        await call.say()


def choices_of(call: EngineCall) -> int:
    """Answers wanted: `n` for each prompt."""
    prompt = call.body.get("prompt", "")
    many = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    return many * int(call.body.get("n") or 1)


async def say_all(call: EngineCall) -> None:
    """One word for every choice."""
    await call.head()
    for index in range(choices_of(call)):
        await call.token("Paris", index)
        await call.event(call.chunk(call.choice(None, index, finish="stop")))
    await call.event(b"[DONE]")
    await call.end()


async def embed(call: EngineCall, form: str | None = None) -> None:
    """Vectors in the form that was asked for, or in the only one that this engine knows."""
    given = call.body["input"]
    many = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
    vectors = [VECTORS[i % 2] for i in range(many)]
    if (form or call.body.get("encoding_format")) == "base64":
        told: list[Any] = [base64.b64encode(struct.pack("<3f", *vector)).decode() for vector in vectors]
    else:
        told = list(vectors)
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(told)]
    usage = {"prompt_tokens": 5 * many, "total_tokens": 5 * many}
    await whole(call, {"object": "list", "data": data, "model": "engine-model", "usage": usage})


async def call_a_tool(call: EngineCall) -> None:
    """Some text, then two calls, their arguments in parts."""
    await call.head()
    await call.token("Let me see.")
    for index, name in enumerate(("weather", "clock")):
        arguments = WEATHER if index == 0 else "{}"
        function = {"name": name, "arguments": ""}
        begin: dict[str, Any] = {"index": index, "id": f"call_{index}", "type": "function", "function": function}
        rest = [{"index": index, "function": {"arguments": cut}} for cut in (arguments[:9], arguments[9:]) if cut]
        for part in (begin, *rest):
            call.sent_tokens += 1
            await call.event(call.chunk({"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None}))
    await call.finish("tool_calls")


async def think(call: EngineCall) -> None:
    """Reasoning, then the answer."""
    await call.head()
    for word in ("Hm", "m."):
        call.sent_tokens += 1
        await call.event(call.chunk({"index": 0, "delta": {"reasoning_content": word}, "finish_reason": None}))
    await call.token("Paris")
    await call.finish()
