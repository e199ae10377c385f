"""Engines' OTLP spans: taken over HTTP with a token, kept once, drawn beside the phases of their request."""

from __future__ import annotations

import gzip
import http.client
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from console.telemetry import engine_spans, partitions
from console.telemetry.models import EngineSpan
from console.telemetry.receiver import MAX_BODY, Address, Receiver
from tests.console.test_pages import signed_in
from tests.e2e.world import World, deliver, settled, uuid7
from tests.e2e.world import shared_world as shared_world

LATENCY = {"time_in_queue": 0.010, "time_in_model_prefill": 0.030, "time_in_model_decode": 0.050}


def value(given: Any) -> AnyValue:
    kinds = {str: "string_value", float: "double_value", int: "int_value"}
    return AnyValue(**{kinds[type(given)]: given})


def export(request_id: str, begun_ns: int, lasts_s: float = 0.1, **more: Any) -> bytes:
    """What vLLM sends of one request."""
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    resource.resource.attributes.append(KeyValue(key="service.name", value=value("vllm")))
    span = resource.scope_spans.add().spans.add()
    span.name, span.span_id, span.trace_id = "llm_request", bytes(range(8)), bytes(range(16))
    span.start_time_unix_nano, span.end_time_unix_nano = begun_ns, begun_ns + int(lasts_s * 1e9)
    told = {"gen_ai.request.id": f"chatcmpl-{request_id}", "gen_ai.usage.prompt_tokens": 20}
    told |= {f"gen_ai.latency.{name}": seconds for name, seconds in LATENCY.items()} | more
    span.attributes.extend(KeyValue(key=name, value=value(given)) for name, given in told.items())
    return message.SerializeToString()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    server = Address(tmp_path / "receiver.json").bind()
    server.start()
    yield server
    server.shutdown()
    server.server_close()


def post(server: Receiver, body: bytes, *, token: str | None = None, path: str = "/v1/traces", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    given = {"authorization": f"Bearer {server.token if token is None else token}"}
    connection.request("POST", path, body, given | {name.replace("_", "-"): text for name, text in headers.items()})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("zipped", [False, True])
def test_a_span_is_kept_once_and_drawn(shared_world: World, receiver: Receiver, zipped: bool) -> None:
    (made,) = deliver(settled(shared_world.aurora, shared_world.key, shared_world.replica))
    begun = (uuid.UUID(made).int >> 80) * 1_000_000 + 5_000_000
    body = export(made, begun)
    for _ in range(2):
        coding = {"content_encoding": "gzip"} if zipped else {}
        assert post(receiver, gzip.compress(body) if zipped else body, **coding) == 200
    (kept,) = EngineSpan.objects.all()
    assert (str(kept.request_id), kept.name, kept.service) == (made, "llm_request", "vllm")
    page = signed_in(shared_world.owner).get(f"/requests/{made}/").content.decode()
    assert "span llm_request, as the engine traced it" in page
    assert re.search(r"\[\[5000, ?15000, ?&quot;tokenize&quot;\], ?\[15000, ?25000,", page)  # backwards from the end
    stranger = signed_in(shared_world.stranger).get(f"/requests/{made}/")
    assert stranger.status_code == 404


def test_who_has_no_token_gets_nothing_kept(shared_world: World, receiver: Receiver) -> None:
    body = export(uuid7(datetime.now(UTC).timestamp()), 10**18)
    assert post(receiver, body, token="") == 401
    assert post(receiver, body, token="x" * 43) == 401
    assert post(receiver, body, path="/metrics") == 404
    assert not EngineSpan.objects.exists()


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"{}"])
def test_nonsense_is_a_400(shared_world: World, receiver: Receiver, body: bytes) -> None:
    assert post(receiver, body) == 400
    assert post(receiver, body, content_encoding="gzip") == 400


def test_too_much_is_refused_packed_or_not(shared_world: World, receiver: Receiver) -> None:
    assert post(receiver, b"", content_length=str(MAX_BODY + 1)) == 413
    assert post(receiver, gzip.compress(b"\0" * (MAX_BODY + 1)), content_encoding="gzip") == 400


def test_spans_of_nobody_and_of_other_days_are_left_out(shared_world: World, receiver: Receiver) -> None:
    now = datetime.now(UTC)
    assert post(receiver, export("no-id-of-ours", 10**18)) == 200
    for days in (-3, 3):
        at = now + timedelta(days=days)
        assert post(receiver, export(uuid7(at.timestamp()), int(at.timestamp() * 1e9))) == 200
    assert not EngineSpan.objects.exists()
    assert receiver.dropped == 0


def test_a_missing_partition_is_made(shared_world: World) -> None:
    from django.db import connection

    now = datetime.now(UTC)
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE telemetry_enginespan_{now:%Y%m%d}")
    told = list(engine_spans.read(export(uuid7(now.timestamp()), int(now.timestamp() * 1e9))))
    assert engine_spans.keep(told, now) == 1
    assert EngineSpan.objects.count() == 1
    assert "telemetry_enginespan" in partitions.TABLES


def test_the_address_outlives_a_restart(tmp_path: Path) -> None:
    address = Address(tmp_path / "receiver.json")
    assert address.read() is None
    first = address.bind()
    known = address.read()
    assert known is not None and known[0] == f"http://127.0.0.1:{first.server_port}/v1/traces"
    first.server_close()
    second = address.bind()
    assert address.read() == known
    third = address.bind()  # somebody else has the port
    assert third.server_port != second.server_port and address.read() != known
    second.server_close()
    third.server_close()


@pytest.mark.parametrize(
    "attributes",
    [{"gen_ai.latency.time_in_queue": "soon"}, {"gen_ai.latency.time_in_model_decode": -1.0},
     {"gen_ai.latency.time_in_model_prefill": 5.0}],
)  # fmt: skip
def test_parts_that_do_not_fit_are_left_out(attributes: dict[str, Any]) -> None:
    (told,) = engine_spans.read(export(uuid7(1.7e9), 1_700_000_000_000_000_000, **attributes))
    drawn = engine_spans.drawn(told, 1_700_000_000_000_000)
    assert (drawn.parts, drawn.end) == ((), 100_000)
