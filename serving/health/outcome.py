"""What the end of an attempt says of the replica."""

from __future__ import annotations

from serving.errors import GatewayError, ShuttingDown, UpstreamFailed

OK = "ok"
FAULT = "fault"  # the way to it broke, or it answered with a 5xx other than 503, or with nonsense
NEUTRAL = (
    "neutral"  # says nothing: the caller's mistake (4xx), back-pressure (429, 503), a client that left, a deadline
)


def outcome_of(error: GatewayError | None) -> str:
    """OK without an error. Only faults count against a replica: one that refuses or is busy is well."""
    if error is None:
        return OK
    return FAULT if isinstance(error, UpstreamFailed) and not isinstance(error, ShuttingDown) else NEUTRAL
