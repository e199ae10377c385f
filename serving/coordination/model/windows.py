"""Sliding windows of a key or a tenant ("scope"), and its requests that are admitted and not settled.

Each second has a bucket, which counts while any part of it lies within the last 60 s: so no window of 60 s, wherever it
begins, holds more than the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

SPAN = 61  # buckets that can overlap 60 s
RATES = ("requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")


def whole_seconds(wait: float) -> int:
    """A Retry-After: whole seconds, 1 to 60."""
    return max(1, min(60, math.ceil(wait)))


class Scope:
    """Sums over the last 61 seconds, kept up to `at`. All amounts are (requests, input tokens, output tokens)."""

    __slots__ = ("at", "buckets", "concurrency", "last", "sums")

    def __init__(self, second: int) -> None:
        self.at = second
        self.last = 0  # second of the last addition
        self.concurrency = 0
        self.sums = [0, 0, 0]
        self.buckets: dict[int, list[int]] = {}  # in no particular order: the clock may step back

    def advance(self, second: int) -> None:
        """Forget what no longer overlaps the last 60 s. A clock that went back lets everything age anew."""
        if second < self.at:
            self.buckets = {second: list(self.sums)}
            self.last = second
        else:
            for gone in [bucket for bucket in self.buckets if bucket + SPAN <= second]:
                for part, amount in enumerate(self.buckets.pop(gone)):
                    self.sums[part] -= amount
        self.at = second

    def add(self, bucket: int, amounts: Sequence[int]) -> None:
        """Change a bucket, never below zero: a clock that went back and forth may have replaced what it counted."""
        counts = self.buckets.setdefault(bucket, [0, 0, 0])
        for part, amount in enumerate(amounts):
            amount = max(amount, -counts[part])
            counts[part] += amount
            self.sums[part] += amount

    def used(self) -> tuple[int, int, int, int]:
        """What the four limits of rates compare, in the order of RATES."""
        requests, given, made = self.sums
        return requests, given + made, given, made

    def wait_for(self, now: float, rate: int, need: int) -> float:
        """Seconds until `need` of a rate has left the window."""
        gone = 0
        for bucket in sorted(self.buckets):
            requests, given, made = self.buckets[bucket]
            gone += (requests, given + made, given, made)[rate]
            if gone >= need:
                return bucket + SPAN - now
        return 60

    def refuse(self, limits: Sequence[Any], wanted: Sequence[int], now: float) -> list[Any] | None:
        """[limit, allowed, used, wanted, retry after, retryable] of the first limit that would break.

        limits: the scope as `wire.scope` makes it. wanted: in the order of RATES.
        """
        used = self.used()
        for rate, name in enumerate(RATES):
            allowed = limits[rate + 1]
            if allowed >= 0 and used[rate] + wanted[rate] > allowed:
                fits = wanted[rate] <= allowed
                wait = self.wait_for(now, rate, used[rate] + wanted[rate] - allowed) if fits else 60
                return [name, allowed, used[rate], wanted[rate], whole_seconds(wait), fits]
        if 0 <= limits[5] < self.concurrency + 1:
            return ["concurrency", limits[5], self.concurrency, 1, 1 if limits[5] else 60, limits[5] > 0]
        return None

    def tighter(self, known: list[Any] | None, allowed: int, used: int, now: float) -> list[Any] | None:
        """The tighter of a known allowance [limit, remaining, seconds until all is back] and this one."""
        if allowed < 0:
            return known
        left = max(0, allowed - used)
        if known and known[1] <= left:
            return known
        return [allowed, left, max(0, self.last + SPAN - now) if used > 0 else 0]


def allowances(scopes: Sequence[Scope], limits: Sequence[Any], now: float) -> tuple[Any, Any]:
    """The tightest allowances of requests and of tokens; False where nothing limits them."""
    requests: list[Any] | None = None
    tokens: list[Any] | None = None
    for scope, limit in zip(scopes, limits, strict=True):
        used = scope.used()
        requests = scope.tighter(requests, limit[1], used[0], now)
        for rate in (1, 2, 3):
            tokens = scope.tighter(tokens, limit[rate + 1], used[rate], now)
    return requests or False, tokens or False
