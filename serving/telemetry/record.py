"""What a finished Request leaves behind, as port's structs. Pure but for reading the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from serving import apikey
from serving.metering import Billed, cost
from serving.port import (
    GatewaySettings,
    Outcome,
    RequestContent,
    RequestDetail,
    RequestRecord,
    Settled,
    UsageRecord,
)
from serving.request import GAP_UNIT_NS, Request
from serving.telemetry import timeline
from serving.telemetry.timeline import Timeline

MAX_DETAIL_BYTES = 4096
MAX_MODEL = 120
MAX_REASON = 16
_GATEWAY_PHASES = ("receive", "auth", "admission", "routing", "connect", "deliver", "settle")
_US = 1000


def settled(request: Request, bill: Billed, settings: GatewaySettings, boot: str) -> Settled:
    """Everything about one finished request (its stamps complete)."""
    merged = timeline.build(
        request.stamps,
        request.report,
        anchor=request.arrival.anchor,
        boot=boot,
        failed=[a for a in request.failed if a.routed != request.stamps.routed],
    )
    return Settled(
        usage=usage(request, bill),
        record=_record(request, bill, merged, settings),
        detail=_bounded(_detail(request, merged)),
        content=_content(request),
    )


def _content(request: Request) -> RequestContent | None:
    if request.capture is None or request.attempts == 0:  # what never ran is not kept
        return None
    return request.capture.content(request.id, request.arrival.started_at, request.principal.tenant_id)


def bare(request: Request, bill: Billed, settings: GatewaySettings) -> Settled:
    """The least that must never be missing, should building the rest fail."""
    nothing = Timeline([], [], "", 0)
    return Settled(
        usage=usage(request, bill),
        record=_record(request, bill, nothing, settings),
        detail=RequestDetail(id=request.id, started_at=request.arrival.started_at),
    )


def usage(request: Request, bill: Billed) -> UsageRecord:
    """The billable line."""
    return UsageRecord(
        id=request.id,
        started_at=request.arrival.started_at,
        tenant_id=request.principal.tenant_id,
        key_id=request.principal.key_id,
        model=_model(request),
        outcome=request.outcome,
        prompt_tokens=bill.prompt,
        cached_tokens=bill.cached,
        completion_tokens=bill.completion,
        reasoning_tokens=bill.reasoning,
        price_version=request.price.version if request.price else None,
        currency=request.price.currency if request.price else "",
        cost=cost(bill, request.price),
    )


def percentile(values: Sequence[int], share: float) -> int:
    """Nearest-rank percentile of sorted values."""
    return values[min(int(len(values) * share), len(values) - 1)]


def _record(request: Request, bill: Billed, merged: Timeline, settings: GatewaySettings) -> RequestRecord:
    stamps, replica = request.stamps, request.replica
    gaps = sorted(request.gaps.values)
    spent = merged.totals().get
    unit = GAP_UNIT_NS // _US
    return RequestRecord(
        id=request.id,
        started_at=request.arrival.started_at,
        tenant_id=request.principal.tenant_id,
        key_id=request.principal.key_id,
        source=request.principal.source,
        endpoint=request.endpoint,
        model=_model(request),
        stream=bool(request.ask and request.ask.stream),
        outcome=request.outcome,
        status=request.status,
        code=request.error.code if request.error else "",
        finish_reason=request.finish_reason[:MAX_REASON] if request.outcome is Outcome.OK else "",
        deployment_id=replica.deployment_id if replica else None,
        replica_id=replica.id if replica else None,
        device=replica.device if replica else "",
        attempts=request.attempts,
        prompt_tokens=bill.prompt,
        cached_tokens=bill.cached,
        completion_tokens=bill.completion,
        duration_us=(stamps.settled - stamps.received) // _US,
        ttft_us=_ttft(request),
        itl_p50_us=percentile(gaps, 0.50) * unit if gaps else None,
        itl_p99_us=percentile(gaps, 0.99) * unit if gaps else None,
        itl_max_us=request.gaps.longest * unit if gaps else None,
        gateway_us=sum(spent(name, 0) for name in _GATEWAY_PHASES) // _US,
        queue_us=(spent("start", 0) + spent("queue", 0)) // _US,
        engine_queue_us=(spent("tokenize", 0) + spent("engine_queue", 0)) // _US,
        prefill_us=spent("prefill", 0) // _US,
        decode_us=spent("decode", 0) // _US,
        unattributed_us=merged.unattributed // _US,
        preemptions=request.report.preemptions if request.report else 0,
        role=request.decision.role if request.decision else "",
        retries=request.retries,
        currency=request.price.currency if request.price else "",
        cost=cost(bill, request.price),
        end_user=request.end_user,
        client_request_id=request.arrival.client_request_id,
        trace_id=request.arrival.trace.trace_id,
        gateway=settings.instance,
        gateway_version=settings.version,
        snapshot_version=request.snapshot.version,
        engine_version=replica.engine_version if replica else "",
    )


def _ttft(request: Request) -> int | None:
    """Only a stream hands over a first token; an answer in one piece has none."""
    if not request.stamps.first_sent:
        return None
    return (request.stamps.first_sent - request.stamps.received) // _US


def _detail(request: Request, merged: Timeline) -> RequestDetail:
    origin = request.stamps.received
    return RequestDetail(
        id=request.id,
        started_at=request.arrival.started_at,
        events=[(who, name, (at - origin) // _US, args) for who, name, at, args in merged.events],
        phases=[
            (p.name, (p.start - origin) // _US, (p.end - origin) // _US, _args(p.args, origin)) for p in merged.phases
        ],
        clock=merged.clock,
        decision=_decision(request, origin),
        candidates=request.decision.candidates if request.decision else (),
        gaps=request.gaps.values,
        gaps_dropped=request.gaps.dropped,
        params=_params(request),
        attempts=[
            {"replica_id": a.replica_id, "error": a.error, "t": (a.failed - origin) // _US} for a in request.failed
        ],
        span_id=request.arrival.trace.span_id,
        parent_span_id=request.arrival.trace.parent_id,
        sampled=request.arrival.trace.flags.endswith(("1", "3", "5", "7", "9", "b", "d", "f")),
        engine=_engine(request),
        error=request.error.message[:500] if request.error else "",
    )


def _args(args: Any, origin: int) -> Any:
    """Chunk parts carry stamps of their own."""
    if "parts" not in args:
        return args
    return {**args, "parts": [[(at - origin) // _US, tokens] for at, tokens in args["parts"]]}


def _decision(request: Request, origin: int) -> dict[str, Any]:
    decision = request.decision
    if decision is None:
        return {}
    return {
        "policy": decision.policy,
        "reason": decision.reason,
        "at": (request.decided_at - origin) // _US,
        "took_us": request.decided_in // _US,
        "replica_id": decision.replica.id if decision.replica else None,
    }


def _params(request: Request) -> dict[str, Any]:
    if request.ask is None:
        return {}
    return {"stream": request.ask.stream, **request.ask.params}


def _engine(request: Request) -> dict[str, Any]:
    """The engine's own counts, also where they are not billed."""
    counts, report = request.counts, request.report
    told: dict[str, Any] = {}
    if request.slot is not None or request.attempts:
        told = {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.completion,
            "relayed": counts.relayed,
            "usage_reported": counts.reported,
        }
    if report is not None:
        told |= {
            "sequence_id": report.sequence_id,
            "cached_tokens": report.cached_tokens,
            "host_tokens": report.host_tokens,
            "computed_tokens": report.computed_tokens,
            "block_size": report.block_size,
            "preemptions": report.preemptions,
            "events_dropped": report.dropped,
        }
    return told


def _bounded(detail: RequestDetail) -> RequestDetail:
    """At most 4 KB: gaps go first, then all but a few events and candidates."""
    if len(detail.gaps) <= 64 and len(detail.events) <= 24 and len(detail.candidates) <= 4 and not detail.attempts:
        return detail  # cannot come near it: not measured
    size = len(msgspec.msgpack.encode(detail))
    if size <= MAX_DETAIL_BYTES:
        return detail
    gaps = list(detail.gaps)
    over = size - MAX_DETAIL_BYTES
    keep = max(len(gaps) - over, 0)  # a gap takes at least one byte
    while keep and len(msgspec.msgpack.encode(gaps[keep:])) < over + 8:
        keep = max(keep - 64, 0)
    dropped = detail.gaps_dropped + len(gaps) - keep
    detail = msgspec.structs.replace(detail, gaps=gaps[:keep], gaps_dropped=dropped)
    if len(msgspec.msgpack.encode(detail)) <= MAX_DETAIL_BYTES:
        return detail
    return msgspec.structs.replace(
        detail, events=[*detail.events[:24], *detail.events[-8:]], candidates=detail.candidates[:4]
    )


def _model(request: Request) -> str:
    return request.route.name if request.route else apikey.hidden(request.model)[:MAX_MODEL]
