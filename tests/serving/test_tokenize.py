"""POST /v1/tokenize and /v1/detokenize."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serving.breadth import every_path
from tests.serving.fakes import MODEL, EngineCall, Stack, well

HELLO = [{"role": "developer", "content": "Hello"}]


@pytest.mark.parametrize("asked", [{"prompt": "Hello", "add_special_tokens": False}, {"messages": HELLO}])
async def test_tokens_are_told_and_cost_nothing(stack: Stack, client: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    stack.engine.script = every_path
    answer = await client.post("/v1/tokenize", json={"model": MODEL, **asked})
    assert answer.json() == {"count": 3, "max_model_len": 8192, "tokens": [1, 2, 3]}
    (call,) = stack.engine.calls
    sent = {name: value for name, value in call.body.items() if name not in ("request_id", "cache_salt")}
    told = {"messages": [{"role": "system", "content": "Hello"}]} if "messages" in asked else asked
    assert (call.path, sent) == ("/tokenize", {"model": "engine-tiny", **told})
    settled = await stack.the_settled()
    assert (settled.record.endpoint, settled.record.outcome) == ("tokenize", "ok")
    assert settled.usage is not None and settled.usage.cost == settled.usage.prompt_tokens == 0
    assert "Hello" not in repr(settled)


async def test_ids_are_spelled(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = every_path
    answer = await client.post("/v1/detokenize", json={"model": MODEL, "tokens": [1, 2]})
    assert answer.json() == {"prompt": "spelled"}
    assert stack.engine.calls[0].path == "/detokenize" and stack.engine.calls[0].body["tokens"] == [1, 2]
    assert (await stack.the_settled()).record.endpoint == "detokenize"


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"prompt": "a", "chat_template": "{{x}}"}, "chat_template"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("detokenize", {"tokens": [1], "temperature": 1}, "temperature"),
    ],
)
async def test_a_bad_field_is_named(
    stack: Stack, client: httpx.AsyncClient, path: str, asked: dict[str, Any], param: str
) -> None:
    answer = await client.post(f"/v1/{path}", json={"model": MODEL, **asked})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stack.engine.calls == []


async def test_nobody_counts_without_a_key(stack: Stack, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/tokenize", json={"model": MODEL, "prompt": "a"}, headers={"Authorization": ""})
    assert answer.status_code == 401 and stack.engine.calls == []


async def test_an_engine_without_a_tokenizer_says_so_and_is_not_at_fault(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    async def nothing_there(call: EngineCall) -> None:
        await call.refuse(404)

    stack.engine.script = nothing_there
    for _ in range(12):  # as many faults would open a breaker
        response = await client.post("/v1/tokenize", json={"model": MODEL, "prompt": "hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unsupported_endpoint")
    stack.engine.script = well
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
