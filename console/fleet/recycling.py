"""When a worker has served long enough and a fresh one takes its place. Pure; fleet.replicas then replaces it.

Besides the limits that a deployment sets, memory that grows and grows tires a worker: beyond what it had once warm, its
KV pool (which fills as it is used), and GROWTH of that or a gibibyte, whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass

WARM_S = 600.0  # ready for this long: what it has by then is what it needs
GROWTH = 0.5
LEAST_GROWTH = 1 << 30


@dataclass(frozen=True)
class Limits:
    """What a deployment allows; None is without limit."""

    max_requests: int | None = None
    max_age_s: int | None = None
    max_rss_bytes: int | None = None


@dataclass(frozen=True)
class Life:
    """A ready worker until now. `requests` and `rss_bytes` are None while they are not known."""

    age_s: float
    requests: int | None = None
    rss_bytes: int | None = None
    settled_rss_bytes: int | None = None  # once warm
    kv_bytes: int = 0


def tired(limits: Limits, life: Life) -> str:
    """Why a worker should be replaced, as part of a sentence; empty while it may go on."""
    if limits.max_requests is not None and life.requests is not None and life.requests >= limits.max_requests:
        return f"{life.requests:,} requests served, the limit is {limits.max_requests:,}"
    if limits.max_age_s is not None and life.age_s >= limits.max_age_s:
        return f"{_time(life.age_s)} old, the limit is {_time(limits.max_age_s)}"
    if life.rss_bytes is None:
        return ""
    if limits.max_rss_bytes is not None and life.rss_bytes >= limits.max_rss_bytes:
        return f"{_gib(life.rss_bytes)} of memory, the limit is {_gib(limits.max_rss_bytes)}"
    if life.settled_rss_bytes is None:
        return ""
    bound = life.settled_rss_bytes + life.kv_bytes + max(int(GROWTH * life.settled_rss_bytes), LEAST_GROWTH)
    if life.rss_bytes >= bound:
        return f"its memory grew from {_gib(life.settled_rss_bytes)} to {_gib(life.rss_bytes)}"
    return ""


def _time(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
