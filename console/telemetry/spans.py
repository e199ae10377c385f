"""Finished requests as OpenTelemetry spans, made by the shipper from what the journal says: the gateway runs no SDK.

One span for the request, with GenAI attributes, and one for each phase of its timeline. Names are those of the
semantic conventions for GenAI as of 0.66b2 (development). Never content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from serving.port import RequestDetail, RequestRecord, Settled

_SCOPE = InstrumentationScope("fanlight.gateway")
_OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings"}
_US = 1000
_PARAMS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}


def wanted(settled: Settled, share: float) -> bool:
    """Whether to export it: failures always; else what the caller samples, or `share` of those that came without."""
    record, detail = settled.record, settled.detail
    if not record.trace_id or record.role == "shadow":
        return False
    if record.outcome in ("error", "timeout", "gateway_lost"):
        return True
    if detail.parent_span_id:
        return detail.sampled
    return int(record.trace_id[-8:], 16) < share * 2**32


def spans(settled: Settled, resource: Resource) -> Iterator[ReadableSpan]:
    """The request's span, then its phases'."""
    record, detail = settled.record, settled.detail
    trace_id, own = int(record.trace_id, 16), detail.span_id or record.id.replace("-", "")[-16:]
    context = _context(trace_id, int(own, 16))
    parent = _context(trace_id, int(detail.parent_span_id, 16), remote=True) if detail.parent_span_id else None
    start = round(record.started_at * 1e9)
    yield ReadableSpan(
        name=f"{_operation(record)} {record.model}",
        context=context,
        parent=parent,
        resource=resource,
        attributes=_attributes(record, detail),
        events=tuple(_events(detail, start)),
        kind=SpanKind.SERVER,
        status=_status(record, detail),
        start_time=start,
        end_time=start + record.duration_us * _US,
        instrumentation_scope=_SCOPE,
    )
    for number, (name, begin, end, args) in enumerate(detail.phases, 1):
        yield ReadableSpan(
            name=f"fanlight.{name}",
            context=_context(trace_id, (int(own, 16) + number) % 2**64 or 1),
            parent=context,
            resource=resource,
            attributes={f"fanlight.{key}": told for key, told in args.items() if isinstance(told, (str, int, float))},
            kind=SpanKind.INTERNAL,
            start_time=start + begin * _US,
            end_time=start + max(begin, end) * _US,
            instrumentation_scope=_SCOPE,
        )


def _context(trace_id: int, span_id: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _operation(record: RequestRecord) -> str:
    return _OPERATIONS.get(record.endpoint, "chat")


def _attributes(record: RequestRecord, detail: RequestDetail) -> dict[str, Any]:
    told: dict[str, Any] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "fanlight",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.id": record.id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "http.response.status_code": record.status,
        "fanlight.tenant.id": record.tenant_id or "",
        "fanlight.key.id": record.key_id or "",
        "fanlight.outcome": record.outcome,
        "fanlight.deployment.id": record.deployment_id or "",
        "fanlight.replica.id": record.replica_id or "",
        "fanlight.device": record.device,
        "fanlight.attempts": record.attempts,
        "fanlight.cost": record.cost / 1e9,
        "fanlight.currency": record.currency,
        "fanlight.routing.policy": str(detail.decision.get("policy", "")),
        "fanlight.routing.reason": str(detail.decision.get("reason", "")),
    }
    if record.finish_reason:
        told["gen_ai.response.finish_reasons"] = (record.finish_reason,)
    if record.ttft_us is not None:
        told["gen_ai.response.time_to_first_chunk"] = record.ttft_us / 1e6
    if record.code:
        told["error.type"] = record.code
    told |= {_PARAMS[name]: value for name, value in detail.params.items() if name in _PARAMS}
    return told


def _events(detail: RequestDetail, start: int) -> Iterator[Event]:
    for source, name, at, _args in detail.events:
        yield Event(f"{source}.{name.lower()}", timestamp=start + at * _US)


def _status(record: RequestRecord, detail: RequestDetail) -> Status:
    """Only what is the service's fault is an error of its span, as the conventions have it for servers."""
    failed = record.outcome in ("error", "timeout", "gateway_lost") or record.status >= 500
    return Status(StatusCode.ERROR, detail.error or record.code) if failed else Status(StatusCode.UNSET)
