"""W3C trace context, without an SDK on the hot path: read it, make it, pass it on."""

from __future__ import annotations

import os
import re

import msgspec

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16
_BUFFERED = 1024


class _Randomness:
    """Random hex digits from the kernel, many at a time: a system call for each request is dear."""

    def __init__(self) -> None:
        self._left = ""

    def take(self, digits: int) -> str:
        if len(self._left) < digits:
            self._left = os.urandom(_BUFFERED).hex()
        taken, self._left = self._left[:digits], self._left[digits:]
        return taken

    def forget(self) -> None:
        """After a fork: two processes must not give the same ids."""
        self._left = ""


_randomness = _Randomness()
os.register_at_fork(after_in_child=_randomness.forget)


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
    span_id = _randomness.take(16)
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is None or match[1] == _NO_TRACE or match[2] == _NO_SPAN:
        return TraceContext(_randomness.take(32), span_id)
    # version 00 has exactly four fields; a later one may have more
    if traceparent is not None and traceparent.startswith("00-") and match[4]:
        return TraceContext(_randomness.take(32), span_id)
    return TraceContext(match[1], span_id, match[2], match[3])
