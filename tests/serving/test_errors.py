"""Every no says why, in OpenAI's envelope, with x-request-id, and never with the key."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from serving import apikey
from tests.serving.conftest import chat, connected
from tests.serving.fakes import (
    EXPIRED_KEY,
    KEY,
    MODEL,
    NARROW_KEY,
    REVOKED_KEY,
    EngineCall,
    Stack,
    replica,
    running,
)

CHAT = "/v1/chat/completions"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The envelope, after checking what every error has."""
    assert response.headers["x-request-id"]
    assert response.headers["openai-version"]
    assert response.headers["openai-processing-ms"].isdecimal()
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"]
    return dict(error)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "No API key"),
        ("sk-something", "malformed"),
        (apikey.generate()[:-1] + "x", "malformed"),
        (apikey.generate(), "not known"),
        (EXPIRED_KEY, "expired"),
        (REVOKED_KEY, "revoked"),
    ],
)
async def test_a_bad_key_is_401_and_only_counted(
    stack: Stack, client: httpx.AsyncClient, key: str | None, says: str
) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {"Authorization": "Basic abc"}
    response = await client.post(CHAT, json=chat(), headers=headers)
    assert response.status_code == 401
    error = error_of(response)
    assert error["code"] == "invalid_api_key"
    assert says in error["message"]
    if key:
        assert key not in response.text
    assert await stack.settled() == []
    assert 'fanlight_unauthenticated_total{reason="' in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
    ],
)
async def test_unknown_paths_and_methods(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert status != 405 or response.headers["allow"] in ("GET", "POST")


BAD_BODIES: list[tuple[Any, int, str, str | None]] = [
    (b"{", 400, "invalid_json", None),
    (b"\xff\xfe", 400, "invalid_json", None),
    (b"", 400, "invalid_json", None),
    (b"[]", 400, "invalid_json", None),
    (b'{"model": "m", "tools": [' + b'{"a":' * 50_000, 400, "invalid_json", None),
    ({}, 400, "missing_required_parameter", "model"),
    ({"model": MODEL}, 400, "missing_required_parameter", "messages"),
    (chat(messages=[]), 400, "invalid_value", "messages"),
    (chat(messages=[{"role": "wizard", "content": "x"}]), 400, "invalid_value", "messages[0].role"),
    (chat(messages=[{"content": "x"}]), 400, "missing_required_parameter", "messages[0].role"),
    (chat(messages=[{"role": "user", "content": 3}]), 400, "invalid_value", "messages[0].content"),
    (
        chat(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x"}}],
                }
            ]
        ),
        400,
        "unsupported_content",
        "messages[0].content[0].type",
    ),
    (chat(temperature=2.5), 400, "invalid_value", "temperature"),
    (chat(temperature="hot"), 400, "invalid_value", "temperature"),
    (chat(top_p=0), 400, "invalid_value", "top_p"),
    (chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    (chat(n=0), 400, "invalid_value", "n"),
    (chat(presence_penalty=3), 400, "invalid_value", "presence_penalty"),
    (chat(logit_bias={"1": 101}), 400, "invalid_value", "logit_bias[...]"),
    (chat(stop=["a", "b", "c", "d", "e"]), 400, "invalid_value", "stop"),
    (chat(stop=[""]), 400, "invalid_value", "stop[0]"),
    (chat(top_logprobs=3), 400, "invalid_request", "top_logprobs"),
    (chat(response_format={"type": "poem"}), 400, "invalid_value", "response_format.type"),
    (chat(stream_options={"include_usage": True}), 400, "invalid_request", "stream_options"),
    (
        chat(stream=True, stream_options={"other": 1}),
        400,
        "unknown_parameter",
        "stream_options.other",
    ),
    (chat(frobnicate=1), 400, "unknown_parameter", "frobnicate"),
    *[
        (chat(**{field: 1}), 400, "forbidden_parameter", field)
        for field in (
            "cache_salt",
            "priority",
            "request_id",
            "kv_transfer_params",
            "vllm_xargs",
            "chat_template",
        )
    ],
    (chat(prompt_logprobs=1), 400, "forbidden_parameter", "prompt_logprobs"),
    (chat(model="nothing"), 404, "model_not_found", "model"),
    (chat(max_tokens=9000), 400, "context_length_exceeded", "max_tokens"),
    (
        chat(messages=[{"role": "user", "content": "x" * 200_000}]),
        400,
        "context_length_exceeded",
        "messages",
    ),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), BAD_BODIES)
async def test_a_bad_body_names_the_field_and_leaves_a_zero_record(
    stack: Stack, client: httpx.AsyncClient, body: Any, status: int, code: str, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    entry = await stack.the_settled()
    assert entry.usage is not None
    assert (entry.record.outcome, entry.record.status, entry.record.code) == (
        "rejected",
        status,
        code,
    )
    assert entry.usage.prompt_tokens == entry.usage.completion_tokens == 0
    assert stack.engine.calls == []


async def test_documented_fields_without_effect_are_accepted(stack: Stack, client: httpx.AsyncClient) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prediction": None,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "verbosity": "low",
        "reasoning_effort": "low",
        "modalities": ["text"],
        "temperature": None,
        "stop": None,
        "seed": None,
    }
    response = await client.post(CHAT, json=chat(**harmless))
    assert response.status_code == 200
    assert set((await stack.engine.call()).body) == {
        "model",
        "messages",
        "stream",
        "stream_options",
        "request_id",
        "cache_salt",
    }


async def test_token_ids_are_counted_exactly(stack: Stack, client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": [1] * 8192}
    response = await client.post("/v1/completions", json=body)
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
    body["prompt"] = [1] * 8191
    assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_another_content_type_is_415(stack: Stack, client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, data={"a": "b"})
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"
    assert (await stack.the_settled()).record.outcome == "rejected"


async def test_a_body_over_the_limit_is_413(root: Any) -> None:
    async with running(root, max_body_bytes=1000) as stack, connected(stack) as client:
        response = await client.post(CHAT, json=chat(messages=[{"role": "user", "content": "x" * 2000}]))
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"

        async def chunked() -> Any:
            yield b"x" * 800
            yield b"x" * 800

        response = await client.post(CHAT, content=chunked(), headers={"content-type": "application/json"})
        assert response.status_code == 413


async def test_a_model_the_key_may_not_use_looks_like_none(stack: Stack) -> None:
    async with connected(stack, NARROW_KEY) as client:
        response = await client.post(CHAT, json=chat())
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["another"]
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 404


async def test_models_say_how_long_their_context_is(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == ["another", MODEL]
    one = (await client.get(f"/v1/models/{MODEL}")).json()
    assert one["object"] == "model" and one["max_model_len"] == 8192


async def test_a_stale_configuration_is_503_never_401(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.snapshots.change(taken_at=time.time() - 901, keys={})
    response = await client.post(CHAT, json=chat())
    assert response.status_code == 503
    assert error_of(response)["code"] == "configuration_stale"
    assert response.headers["retry-after"].isdecimal()
    assert (await client.get("/readyz")).json() == {
        "ready": False,
        "reasons": ["configuration_stale"],
    }
    assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("state", ["starting", "draining", "stopped"])
async def test_no_ready_replica_is_503_and_says_why(stack: Stack, client: httpx.AsyncClient, state: str) -> None:
    stack.snapshots.change(replicas={"replica-1": replica(stack.engine.path, state=state)})
    response = await client.post(CHAT, json=chat())
    assert response.status_code == 503
    assert error_of(response)["code"] == "no_ready_replica"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    entry = await stack.the_settled()
    assert entry.record.outcome == "rejected"
    assert entry.detail.candidates[0]["verdict"] == state


async def test_low_disk_is_503_before_metering_is_at_risk(root: Any) -> None:
    async with running(root, min_free_disk_bytes=2**62) as stack, connected(stack) as client:
        response = await client.post(CHAT, json=chat())
        assert (response.status_code, error_of(response)["code"]) == (503, "low_disk")
        assert (await client.get("/readyz")).status_code == 503


async def test_too_many_in_flight_is_503(root: Any) -> None:
    async def hang(call: EngineCall) -> None:
        await call.until_closed()

    async with running(root, max_in_flight=1) as stack, connected(stack) as client:
        stack.engine.script = hang
        first = asyncio.create_task(client.post(CHAT, json=chat()))
        await stack.engine.call()
        response = await client.post(CHAT, json=chat())
        assert (response.status_code, error_of(response)["code"]) == (503, "too_many_in_flight")
        first.cancel()
        await stack.idle()


@pytest.mark.parametrize("status", [400, 422, 429])
async def test_the_engines_refusal_is_passed_on(stack: Stack, client: httpx.AsyncClient, status: int) -> None:
    async def refuse(call: EngineCall) -> None:
        await call.refuse(status, "too odd")

    stack.engine.script = refuse
    for stream in (False, True):
        response = await client.post(CHAT, json=chat(stream=stream))
        assert response.status_code == status
        assert error_of(response) == {
            "message": "too odd",
            "type": "invalid_request_error",
            "param": None,
            "code": "engine_code",
        }
    assert len(stack.engine.calls) == 2  # not tried again
    assert {e.record.outcome for e in await stack.settled()} == {"rejected"}


async def test_a_full_engine_is_503_with_its_retry_after(stack: Stack, client: httpx.AsyncClient) -> None:
    async def full(call: EngineCall) -> None:
        await call.refuse(503, "full", **{"Retry-After": "7"})

    stack.engine.script = full
    response = await client.post(CHAT, json=chat())
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_overloaded")
    assert response.headers["retry-after"] == "7"
    assert len(stack.engine.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [401, 404, 500])
async def test_a_failing_engine_is_502_after_three_attempts(
    stack: Stack, client: httpx.AsyncClient, status: int, stream: bool
) -> None:
    """401 and 404 too: there, it is our own request that was wrong, not the caller's."""

    async def fail(call: EngineCall) -> None:
        await call.refuse(status)

    stack.engine.script = fail
    response = await client.post(CHAT, json=chat(stream=stream))
    assert (response.status_code, error_of(response)["code"]) == (502, "engine_error")
    entry = await stack.the_settled()
    assert (entry.record.outcome, entry.record.attempts, len(entry.detail.attempts)) == (
        "error",
        3,
        3,
    )


async def test_a_bug_is_500_with_a_traceback_in_the_log_only(
    stack: Stack,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("some bug")

    monkeypatch.setattr("serving.admission.admit", broken)
    response = await client.post(CHAT, json=chat())
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "some bug" not in response.text
    assert "ZeroDivisionError" in caplog.text
    assert KEY not in caplog.text
    assert (await stack.the_settled()).record.outcome == "error"
    monkeypatch.undo()
    assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_a_record_that_cannot_be_made_still_bills(
    stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("serving.telemetry.timeline.build", broken)
    assert (await client.post(CHAT, json=chat())).status_code == 200
    entry = await stack.the_settled()
    assert entry.usage is not None and entry.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(model=KEY)),
        (CHAT, chat(model=f"a {KEY}-x")),
        (CHAT, chat(**{KEY: 1})),
        (CHAT, chat(logit_bias={KEY: "x"})),
        (f"/v1/models/{KEY}", None),
        (f"/v1/{KEY}", None),
    ],
)
async def test_a_key_in_the_wrong_place_is_not_told_or_kept(
    stack: Stack, client: httpx.AsyncClient, path: str, body: dict[str, Any] | None
) -> None:
    headers = {"x-request-id": KEY}
    response = await (client.post(path, json=body, headers=headers) if body else client.get(path, headers=headers))
    assert response.status_code in (400, 404)
    error_of(response)
    assert KEY not in response.text
    assert KEY not in repr(await stack.settled())


@pytest.mark.parametrize("body", [chat(model="m" * 250), chat(**{"x" * 1_000_000: 1}), chat(model="a\\u0000b")])
async def test_what_an_error_quotes_is_short(stack: Stack, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post(CHAT, json=body)
    error_of(response)
    assert len(response.content) < 5000
    (settled,) = await stack.settled()
    assert len(settled.record.model) <= 120
    assert len(settled.detail.error) <= 500
