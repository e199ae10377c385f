"""The OpenAPI document, and bodies made after it and against it: no 5xx, no hang, always the right envelope."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.asgi import DIALECTS
from serving.endpoints.openapi import document
from tests.serving.breadth import every_path
from tests.serving.conftest import connected
from tests.serving.fakes import KEY, MODEL, Stack, running

DOCUMENT = json.loads(document("0"))
POSTS = sorted(path for path, item in DOCUMENT["paths"].items() if "post" in item)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def the_envelope(path: str, answer: httpx.Response) -> None:
    """Whatever is refused is told in the words of its API, and never as a failure of ours."""
    assert answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.headers["x-request-id"]
    if answer.status_code == 200:
        return
    told = answer.json()
    if path.startswith("/v1/messages"):
        assert set(told) == {"type", "error", "request_id"} and set(told["error"]) == {"type", "message"}
        assert told["request_id"] == answer.headers["request-id"]
    else:
        assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}


async def test_it_is_served_to_everybody(stack: Stack) -> None:
    async with connected(stack, key=None) as client:
        told = (await client.get("/v1/openapi.json")).json()
    assert told["openapi"] == "3.1.0" and told["info"]["version"] == stack.settings.version
    assert set(POSTS) == set(DIALECTS)


@pytest.mark.parametrize("path", POSTS)
def test_its_schemas_are_schemas_and_forbid_what_the_gateway_refuses(path: str) -> None:
    reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**reference, "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert not validator.is_valid({"model": MODEL, "cache_salt": "mine"})
    assert not validator.is_valid({})


def operations() -> Any:
    return [operation.ok() for operation in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()]


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.label)
async def test_bodies_made_after_the_document(root: Path, operation: Any) -> None:
    async with running(root) as stack:
        stack.engine.script = every_path
        loop = asyncio.get_running_loop()
        async with connected(stack) as client:

            @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(case=operation.as_strategy())
            def check(case: Any) -> None:
                if isinstance(case.body, dict):
                    case.body["model"] = MODEL
                path = case.formatted_path.replace("%", "")
                body = None if operation.method == "get" else json.dumps(case.body).encode()
                kind = {"content-type": "application/json"}
                sent = client.request(operation.method, path, content=body, headers=kind)
                the_envelope(operation.path, asyncio.run_coroutine_threadsafe(sent, loop).result(10))

            await asyncio.to_thread(check)
        assert stack.in_flight == 0


@pytest.mark.parametrize("path", POSTS)
async def test_bodies_of_any_kind(root: Path, path: str) -> None:
    async with running(root) as stack:
        stack.engine.script = every_path
        loop = asyncio.get_running_loop()
        fields = sorted(_fields(path))
        bodies = st.dictionaries(st.sampled_from(fields) | st.text(max_size=5), JSON, max_size=8)
        async with connected(stack) as client:

            @settings(max_examples=80, deadline=None, database=None)
            @given(body=bodies | JSON, known=st.booleans())
            def check(body: Any, known: bool) -> None:
                if known and isinstance(body, dict):
                    body = {**body, "model": MODEL}
                kind = {"content-type": "application/json"}
                sent = client.post(path, content=json.dumps(body).encode(), headers=kind)
                the_envelope(path, asyncio.run_coroutine_threadsafe(sent, loop).result(10))

            await asyncio.to_thread(check)


def _fields(path: str) -> set[str]:
    reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return set(DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]["properties"])


HOSTILE = {
    "not UTF-8": b'{"model":"\xff\xfe"}',
    "a lone surrogate": b'{"model":"\\ud800"}',
    "NUL": b'{"model":"tiny\\u0000","messages":[{"role":"user","content":"\\u0000"}]}',
    "a bare NUL": b'{"model":"a\x00b"}',
    "deep": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep and known": b'{"model":"tiny","metadata":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "a huge number": b'{"model":"tiny","max_tokens":' + b"9" * 5000 + b"}",
    "a huge exponent": b'{"model":"tiny","temperature":1e999999}',
    "not a number": b'{"model":"tiny","temperature":NaN}',
    "twice the same": b'{"model":"none","model":"none","messages":[]}',
    "two values": b'{"model":"tiny"}{"model":"tiny"}',
    "nothing": b"",
    "blank": b" \n\t ",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "cut": b'{"model":"tiny","messages":[{"role":"us',
    "many fields": b"{" + b",".join(b'"f%d":0' % i for i in range(20_000)) + b"}",
}


@pytest.mark.parametrize("path", POSTS)
async def test_hostile_bodies(stack: Stack, client: httpx.AsyncClient, path: str) -> None:
    stack.engine.script = every_path
    for body in HOSTILE.values():
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        the_envelope(path, answer)
        assert answer.status_code in (400, 404)
    assert stack.engine.calls == []


@pytest.mark.parametrize("path", POSTS)
async def test_other_types_and_methods(client: httpx.AsyncClient, path: str) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "\xff"):
        answer = await client.post(path, content=b"{}", headers={"content-type": kind.encode("latin-1")})  # type: ignore[dict-item]
        the_envelope(path, answer)
        assert answer.status_code == 415
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = await client.request(method, path)
        the_envelope(path, answer)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


RAW = {
    "a flood of headers": b"".join(b"x-%d: y\r\n" % i for i in range(20_000)),
    "a long header": b"x-long: " + b"y" * 1_000_000 + b"\r\n",
    "header bytes of no charset": b"traceparent: \xff\xfe\r\nx-request-id: \xff\r\nx-stainless-retry-count: \xff\r\n",
    "huge numbers": b"x-stainless-retry-count: " + b"9" * 9000 + b"\r\n",
    "two lengths": b"content-length: 2\r\ncontent-length: 3\r\n",
    "no length": b"content-length: " + b"9" * 400 + b"\r\n",
    "a negative length": b"content-length: -1\r\n",
    "a length and chunks": b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
    "a broken line": b"no colon here\r\n",
    "many keys": b"authorization: Bearer x\r\n" * 50,
}


@pytest.mark.parametrize("name", RAW)
async def test_hostile_heads_end_in_an_answer_or_the_end_of_the_connection(stack: Stack, name: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + RAW[name]
    try:
        writer.write(head + b"connection: close\r\n\r\n{}")
        async with asyncio.timeout(10):
            answer = await reader.read(65536)
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    assert not answer or answer.split(b" ")[1] in (b"400", b"401", b"413", b"431")
    async with connected(stack, KEY) as client:
        assert (await client.get("/v1/models")).status_code == 200  # and the gateway lives on
