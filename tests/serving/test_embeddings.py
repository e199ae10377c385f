"""POST /v1/embeddings, for engines of every form of vectors."""

from __future__ import annotations

import base64
import struct
from typing import Any

import httpx
import pytest

from tests.serving.breadth import VECTORS, embed, whole
from tests.serving.fakes import MODEL, PRICE, EngineCall, Stack


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": ["one", "two"]} | changes


@pytest.mark.parametrize("form", ["float", "base64", None])
@pytest.mark.parametrize("known", ["float", "base64", None])
async def test_vectors_come_in_the_form_asked_for_whatever_the_engine_knows(
    stack: Stack, client: httpx.AsyncClient, form: str | None, known: str | None
) -> None:
    async def script(call: EngineCall) -> None:
        await embed(call, known)

    stack.engine.script = script
    told = (await client.post("/v1/embeddings", json=asked(encoding_format=form))).json()
    vectors = [item["embedding"] for item in told["data"]]
    if form == "base64":
        vectors = [list(struct.unpack("<3f", base64.b64decode(vector))) for vector in vectors]
    assert vectors == VECTORS
    assert [item["index"] for item in told["data"]] == [0, 1]
    assert (told["object"], told["model"]) == ("list", MODEL)
    assert told["usage"] == {"prompt_tokens": 10, "total_tokens": 10}


async def test_prompt_tokens_are_billed_and_the_tenant_is_told_apart(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = embed
    await client.post("/v1/embeddings", json=asked(dimensions=3, user="someone"))
    settled = await stack.the_settled()
    assert settled.usage is not None and settled.usage.outcome == "ok"
    assert (settled.usage.prompt_tokens, settled.usage.completion_tokens) == (10, 0)
    assert settled.usage.cost == 10 * PRICE.input // 1000
    assert (settled.record.endpoint, len(settled.record.end_user)) == ("embeddings", 16)
    assert settled.detail.params == {"dimensions": 3, "inputs": 2, "stream": False}
    (call,) = stack.engine.calls
    assert call.path == "/v1/embeddings" and call.body["dimensions"] == 3
    assert len(call.body["cache_salt"]) == 32  # else tenants would share a prefix cache
    assert not {"stream", "stream_options", "max_tokens", "user"}.intersection(call.body)


@pytest.mark.parametrize("given", ["text", [1, 2, 3], [[1, 2], [3]]])
async def test_inputs_of_every_kind(stack: Stack, client: httpx.AsyncClient, given: Any) -> None:
    stack.engine.script = embed
    answer = await client.post("/v1/embeddings", json=asked(input=given))
    assert answer.status_code == 200 and stack.engine.calls[0].body["input"] == given


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "word " * 50_000}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"stream": True}, "stream"),
        ({"cache_salt": "mine"}, "cache_salt"),
    ],
)
async def test_a_bad_field_is_named(
    stack: Stack, client: httpx.AsyncClient, changes: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/embeddings", json=asked(**changes))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stack.engine.calls == []


@pytest.mark.parametrize("body", [{"data": 3}, [], {"data": [{"index": 0, "embedding": "!!!"}]}, {}])
async def test_an_answer_that_cannot_be_read_is_a_fault_of_the_engine(
    stack: Stack, client: httpx.AsyncClient, body: Any
) -> None:
    async def nonsense(call: EngineCall) -> None:
        await whole(call, body)

    stack.engine.script = nonsense
    answer = await client.post("/v1/embeddings", json=asked())
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_error")
    assert (await stack.the_settled()).usage.prompt_tokens == 0  # type: ignore[union-attr]


async def test_a_refusal_of_the_engine_is_passed_on(stack: Stack, client: httpx.AsyncClient) -> None:
    async def refuse(call: EngineCall) -> None:
        await call.refuse(400, "not an embedding model")

    stack.engine.script = refuse
    answer = await client.post("/v1/embeddings", json=asked())
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "not an embedding model")
