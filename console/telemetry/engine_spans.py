"""What engines tell of requests by OTLP, such as vLLM's `llm_request`: read, kept, laid beside the gateway's phases.

A span belongs to a request by the id that the gateway gave it (`gen_ai.request.id`; vLLM puts a prefix before it).
Times are the wall clock's of the engine's machine.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db import DatabaseError, connection
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from console.telemetry import partitions
from console.telemetry.models import EngineSpan

REQUEST_ID = "gen_ai.request.id"
MAX_ATTRIBUTES = 40
MAX_TEXT = 200
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_YEAR_10000 = "e677d21f"  # as ids begin that are of it: no calendar here goes so far
_LATENCY = "gen_ai.latency."
# vLLM's attributes in the order in which they happen: how long, in seconds
_PARTS = (
    ("engine_queue", "time_in_queue"),
    ("prefill", "time_in_model_prefill"),
    ("decode", "time_in_model_decode"),
)


@dataclass(frozen=True)
class Told:
    """One span as it came, with the request it is of."""

    request_id: uuid.UUID
    span_id: str
    parent_id: str
    name: str
    service: str
    begun_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]

    @property
    def started_at(self) -> datetime:
        """When the request was received, as its id says: the key of its day."""
        return datetime.fromtimestamp((self.request_id.int >> 80) / 1000, UTC)


def read(body: bytes) -> Iterator[Told]:
    """The spans of an OTLP export that name one of our requests. Raises ValueError for what is no export."""
    try:
        export = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise ValueError("The body is no OTLP export in protobuf.") from error
    for resource in export.resource_spans:
        service = _attributes(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = _attributes(span.attributes)
                found = _UUID.search(str(attributes.get(REQUEST_ID, "")))
                if (
                    found is not None
                    and found[0] < _YEAR_10000
                    and 0 < span.start_time_unix_nano <= span.end_time_unix_nano < 1 << 63
                ):
                    yield Told(
                        request_id=uuid.UUID(found[0]),
                        span_id=span.span_id.hex()[:16],
                        parent_id=span.parent_span_id.hex()[:16],
                        name=span.name.replace("\0", "")[:80],
                        service=str(service)[:80],
                        begun_ns=span.start_time_unix_nano,
                        ended_ns=span.end_time_unix_nano,
                        attributes=attributes,
                    )


def _attributes(values: Iterable[Any]) -> dict[str, Any]:
    """Scalars only, bounded."""
    found: dict[str, Any] = {}
    for each in list(values)[:MAX_ATTRIBUTES]:
        kind = each.value.WhichOneof("value")
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            value = getattr(each.value, kind)
            if isinstance(value, float) and not math.isfinite(value):
                continue  # JSON has no word for it, and one span must not cost the others of its export
            found[each.key.replace("\0", "")[:80]] = (
                value.replace("\0", "")[:MAX_TEXT] if isinstance(value, str) else value
            )
    return found


def keep(spans: Sequence[Told], now: datetime) -> int:
    """Write them, each once; those whose request is older than a day or from the future are left out."""
    rows = [
        EngineSpan(
            request_id=span.request_id, started_at=span.started_at, span_id=span.span_id, parent_id=span.parent_id,
            name=span.name, service=span.service, begun_ns=span.begun_ns, ended_ns=span.ended_ns,
            attributes=dict(span.attributes),
        )
        for span in spans
        if abs((now - span.started_at).total_seconds()) < 86_400
    ]  # fmt: skip
    if not rows:
        return 0
    try:
        EngineSpan.objects.bulk_create(rows, ignore_conflicts=True)
    except DatabaseError:
        connection.close_if_unusable_or_obsolete()
        for day in {row.started_at.date() for row in rows}:  # at midnight its partition may be missing
            partitions.ensure_for(day)
        EngineSpan.objects.bulk_create(rows, ignore_conflicts=True)
    return len(rows)


@dataclass(frozen=True)
class Drawn:
    """One span for the waterfall: microseconds since the request was received, and its parts in the same unit."""

    name: str
    service: str
    start: int
    end: int
    parts: tuple[tuple[str, int, int], ...]  # phase, start, end
    attributes: Mapping[str, Any]


def drawn(span: EngineSpan | Told, origin_us: int) -> Drawn:
    """`origin_us` is when the request was received, in microseconds of the wall clock."""
    start, end = span.begun_ns // 1000 - origin_us, span.ended_ns // 1000 - origin_us
    return Drawn(span.name, span.service, start, end, _parts(span.attributes, start, end), span.attributes)


def _parts(attributes: Mapping[str, Any], start: int, end: int) -> tuple[tuple[str, int, int], ...]:
    """Queue, prefill and decode, laid backwards from the end; what is before them is the engine's front end."""
    lengths = [(phase, _us(attributes.get(_LATENCY + name))) for phase, name in _PARTS]
    if any(length is None for _phase, length in lengths):
        return ()
    at = end - sum(length or 0 for _phase, length in lengths)
    if at < start:
        return ()
    parts = [("tokenize", start, at)] if at > start else []
    for phase, length in lengths:
        parts.append((phase, at, at + (length or 0)))
        at += length or 0
    return tuple(parts)


def _us(seconds: Any) -> int | None:
    usable = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < 86_400
    return round(seconds * 1e6) if usable else None
