"""Which replica of a pool is far from its peers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import msgspec

LEAST_ATTEMPTS = 20  # of a replica before it is judged, and of its peers together
ERROR_MARGIN, ERROR_TIMES = 0.2, 3.0
LATENCY_MARGIN_S, LATENCY_TIMES = 0.1, 5.0


class Account(msgspec.Struct, frozen=True):
    """How one replica answered lately."""

    attempts: int
    faults: int
    latencies: tuple[float, ...] = ()  # seconds to the first token, of attempts that went well


def outliers(pool: Mapping[str, Account]) -> dict[str, str]:
    """Replicas that are far from the others, the worst first, each with the reason."""
    found: dict[str, tuple[float, str]] = {}
    for replica_id, mine in pool.items():
        peers = [account for other, account in pool.items() if other != replica_id]
        told = _by_errors(mine, peers) or _by_latency(mine, peers)
        if told:
            found[replica_id] = told
    return {name: reason for name, (_, reason) in sorted(found.items(), key=lambda each: -each[1][0])}


def allowed(pool: int) -> int:
    """How many of a pool may be out at once: never more than half, never the last one."""
    return pool // 2


def _by_errors(mine: Account, peers: list[Account]) -> tuple[float, str] | None:
    attempts, faults = sum(each.attempts for each in peers), sum(each.faults for each in peers)
    if min(mine.attempts, attempts) < LEAST_ATTEMPTS:
        return None
    share, theirs = mine.faults / mine.attempts, faults / attempts
    if share <= theirs + ERROR_MARGIN or share <= theirs * ERROR_TIMES:
        return None
    return 1000 + share, f"{share:.0%} of its attempts were faults, {theirs:.0%} of its peers'"


def _by_latency(mine: Account, peers: list[Account]) -> tuple[float, str] | None:
    medians = [median(each.latencies) for each in peers if len(each.latencies) >= LEAST_ATTEMPTS]
    if len(mine.latencies) < LEAST_ATTEMPTS or not medians:
        return None
    own, theirs = median(mine.latencies), median(medians)
    if own <= theirs + LATENCY_MARGIN_S or own <= theirs * LATENCY_TIMES:
        return None
    return own, f"its median time to the first token is {own:.3f} s, its peers' {theirs:.3f} s"
