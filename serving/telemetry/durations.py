"""Phases of an engine that tells how long they took and not when they were: vLLM with --enable-per-request-metrics.

Its last chunk holds `metrics` with queue_time_ms (queued until scheduled), time_to_first_token_ms (scheduled until the
first token) and generation_time_ms (first token until the last), as of vLLM 0.32. They are laid backwards and forwards
from the moment at which the first token came here, so that the way from there to here counts as part of `connect`.
"""

from __future__ import annotations

import math

import msgspec

from serving.telemetry.timeline import DURATIONS, EngineReport, Event

_LONGEST_MS = 86_400_000.0


class Durations(msgspec.Struct, frozen=True):
    """Milliseconds, each None where the engine did not measure it."""

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None


def report_of(
    told: Durations, posted: int, first_token: int, now: int, prompt: int, cached: int
) -> EngineReport | None:
    """The engine's events on the gateway's clock; None where the durations do not fit what was seen here.

    Args:
        posted: when the request was handed to the connection (monotonic ns).
        first_token: when its first token came (monotonic ns).
        now: when this was told: all of it was over by then. A first token that came late moves everything back.
        prompt, cached: tokens, as the engine counts them.
    """
    queue, prefill = _ns(told.queue_time_ms), _ns(told.time_to_first_token_ms)
    if prefill is None or not posted or not first_token:
        return None
    decode = _ns(told.generation_time_ms)
    first_token = min(first_token, now - (decode or 0))
    scheduled = first_token - prefill
    queued = scheduled - (queue or 0)
    if queued < posted:
        return None
    events: list[Event] = [
        ("QUEUED", queued, {}),
        ("SCHEDULED", scheduled, {"cached_tokens": cached}),
        ("FIRST_TOKEN", first_token, {}),
    ]
    if decode is not None:
        events.append(("FINISHED", first_token + decode, {}))
    return EngineReport(clock=DURATIONS, events=events, cached_tokens=cached, computed_tokens=max(prompt - cached, 0))


def _ns(milliseconds: float | None) -> int | None:
    if milliseconds is None or not math.isfinite(milliseconds) or not 0 <= milliseconds < _LONGEST_MS:
        return None
    return round(milliseconds * 1e6)
