"""Requests as OpenTelemetry spans, and a collector that does not get in the ledger's way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from console.telemetry.export import MAX_WAITING, ExportingSink
from console.telemetry.spans import spans, wanted
from serving.port import RequestDetail, RequestRecord, Settled

TRACE = "0af7651916cd43dd8448eb211c80319c"


def settled(outcome: str = "ok", **detail: object) -> Settled:
    record = RequestRecord(
        id="01a22ab5-faa2-7244-ab1d-c1478db59c28", started_at=1_800_000_000.25, tenant_id="t", key_id="k",
        source="api", endpoint="chat", model="tiny", stream=True, outcome=outcome,
        status=200 if outcome == "ok" else 502,
        code="" if outcome == "ok" else "engine_error", finish_reason="stop", prompt_tokens=12, cached_tokens=4,
        completion_tokens=7, duration_us=9_000, ttft_us=2_000, trace_id=TRACE, cost=1_500, currency="USD",
    )  # fmt: skip
    told = {
        "phases": [("auth", 0, 50, {}), ("prefill", 1_000, 2_000, {"cached_tokens": 4, "parts": [[1, 2]]})],
        "events": [("engine", "FIRST_TOKEN", 2_000, {})],
        "params": {"temperature": 0.5, "stream": True},
        "decision": {"policy": "least-connections", "reason": "the fewest slots in use"},
        "span_id": "00f067aa0ba902b7",
        **detail,
    }
    return Settled(
        usage=None,
        record=record,
        detail=RequestDetail(id=record.id, started_at=record.started_at, **told),  # type: ignore[arg-type]
    )


def made(entry: Settled) -> list[ReadableSpan]:
    return list(spans(entry, Resource.create({"service.name": "fanlight-gateway"})))


def test_a_request_is_a_server_span_with_genai_names_and_a_span_for_each_phase() -> None:
    root, *phases = made(settled(parent_span_id="b7ad6b7169203331"))
    assert (root.name, root.kind) == ("chat tiny", SpanKind.SERVER)
    assert root.context is not None and f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None and f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == 12
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert root.attributes["gen_ai.request.temperature"] == 0.5
    assert root.attributes["gen_ai.response.time_to_first_chunk"] == 0.002
    assert root.end_time is not None and root.start_time is not None
    assert root.end_time - root.start_time == 9_000_000
    assert [span.name for span in phases] == ["fanlight.auth", "fanlight.prefill"]
    assert all(span.parent == root.context for span in phases)
    ids = {span.context.span_id for span in (root, *phases) if span.context}
    assert len(ids) == 3
    assert root.events[0].name == "engine.first_token"


def test_failures_are_errors_and_always_exported() -> None:
    (root, *_) = made(settled("error"))
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes is not None and root.attributes["error.type"] == "engine_error"
    assert wanted(settled("error"), 0.0)


def test_the_callers_decision_counts_before_our_share() -> None:
    assert not wanted(settled(), 0.0)
    assert wanted(settled(), 1.0)
    assert wanted(settled(parent_span_id="b7ad6b7169203331"), 0.0)
    assert not wanted(settled(parent_span_id="b7ad6b7169203331", sampled=False), 1.0)


class Ledger:
    def __init__(self) -> None:
        self.written = 0

    def write(self, batch: Sequence[Settled]) -> None:
        self.written += len(batch)


class Stuck(SpanExporter):
    """A collector that takes the connection and never answers, until it is let go."""

    def __init__(self) -> None:
        self.exported: list[ReadableSpan] = []
        self.go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go.wait(30)
        self.exported += spans
        return SpanExportResult.SUCCESS


def test_a_collector_that_hangs_holds_nothing_up_and_what_is_dropped_is_counted() -> None:
    ledger, collector = Ledger(), Stuck()
    sink = ExportingSink(ledger, collector, 1.0)
    batches = MAX_WAITING + 10
    for _ in range(batches):
        sink.write([settled()])
    assert ledger.written == batches
    assert batches - MAX_WAITING - 1 <= sink.dropped <= batches - MAX_WAITING
    collector.go.set()
    sink.close()
    assert len(collector.exported) == 3 * (batches - sink.dropped)
