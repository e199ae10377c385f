"""When a worker is replaced by a fresh one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.fleet.recycling import LEAST_GROWTH, Life, Limits, tired

GIB = 1 << 30
LIFE = Life(age_s=7200, requests=999, rss_bytes=2 * GIB, settled_rss_bytes=GIB, kv_bytes=GIB)


def test_without_limits_and_without_growth_a_worker_goes_on() -> None:
    assert tired(Limits(), LIFE) == ""
    assert tired(Limits(max_requests=1000, max_age_s=7201, max_rss_bytes=2 * GIB + 1), LIFE) == ""


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(max_requests=999), "999 requests served, the limit is 999"),
        (Limits(max_age_s=7200), "2 h old, the limit is 2 h"),
        (Limits(max_rss_bytes=2 * GIB), "2.00 GiB of memory, the limit is 2.00 GiB"),
    ],
)
def test_each_limit_tires_with_its_reason(limits: Limits, why: str) -> None:
    assert tired(limits, LIFE) == why


def test_memory_that_grows_tires_but_a_pool_that_fills_does_not() -> None:
    bound = GIB + GIB + LEAST_GROWTH
    assert tired(Limits(), replace(LIFE, rss_bytes=bound - 1)) == ""
    assert tired(Limits(), replace(LIFE, rss_bytes=bound)) == "its memory grew from 1.00 GiB to 3.00 GiB"
    large = replace(LIFE, settled_rss_bytes=10 * GIB, rss_bytes=15 * GIB)
    assert tired(Limits(), large) == "", "half of it, not a gibibyte"
    assert tired(Limits(), replace(large, rss_bytes=16 * GIB))


def test_what_is_not_known_tires_nobody() -> None:
    unknown = Life(age_s=10)
    assert tired(Limits(max_requests=1, max_age_s=11, max_rss_bytes=1), unknown) == ""
    assert tired(Limits(), replace(LIFE, settled_rss_bytes=None, rss_bytes=99 * GIB)) == ""
