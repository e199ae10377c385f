"""W3C trace context, without an SDK on the hot path: read it, make it, pass it on."""

from __future__ import annotations

import os
import re

import msgspec

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16


class TraceContext(msgspec.Struct, frozen=True):
    """Where this request stands in a trace; `span_id` is ours, `parent_id` the caller's span, if it sent one."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    flags: str = "01"

    def header(self) -> str:
        """The traceparent that names our span as the parent of what follows."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def continued(traceparent: str | None) -> TraceContext:
    """Continue the caller's trace, or start one where it sent none or nonsense."""
    span_id = os.urandom(8).hex()
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is None or match[1] == _NO_TRACE or match[2] == _NO_SPAN:
        return TraceContext(os.urandom(16).hex(), span_id)
    # version 00 has exactly four fields; a later one may have more
    if traceparent is not None and traceparent.startswith("00-") and match[4]:
        return TraceContext(os.urandom(16).hex(), span_id)
    return TraceContext(match[1], span_id, match[2], match[3])
