"""What gateways share in Valkey, for pages and jobs: how much of each limit is used, and correcting what was spent.

The console's one door to serving.coordination; the functions and their answers are described in its library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import redis

from console.fleet import live
from serving.coordination import wire
from serving.coordination.calendar import bounds
from serving.coordination.library import Library

__all__ = ["Away", "BudgetWindow", "Reading", "Rates", "budget_window", "correct", "read"]


class Away(Exception):
    """Valkey does not answer, or not with sense."""


@dataclass(frozen=True)
class BudgetWindow:
    """One window of one budget: its name in Valkey, and its time in seconds since the epoch (0, 0: all of it)."""

    name: str
    start: int
    end: int

    def holds(self, now: float) -> bool:
        return self.end == 0 or self.start <= now < self.end


@dataclass(frozen=True)
class Rates:
    """What was used in the last 60 seconds, and the requests that are admitted now."""

    requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int


@dataclass(frozen=True)
class Reading:
    """`now` is Valkey's clock; `money` is [(reserved, spent)] in nano-units, in the order asked for."""

    now: float
    rates: list[Rates]
    money: list[tuple[int, int]]


def budget_window(kind: str, scope_id: str, currency: str, window: str, zone: str, now: float) -> BudgetWindow:
    """The window of a key's or tenant's budget around `now`."""
    start, end = bounds(window, zone, now)
    return BudgetWindow(wire.budget_name(kind, scope_id, currency, window, start), start, end)


def read(scopes: Sequence[tuple[str, str]], budgets: Sequence[str] = ()) -> Reading:
    """The use of each (kind, id) and each named budget, in one look. Raises Away."""
    names = [wire.scope_name(kind, scope_id) for kind, scope_id in scopes]
    now, rates, money, _depth, _slots = _call("read", [names, list(budgets)])
    return Reading(now, [Rates(*map(int, each)) for each in rates], [(int(r), int(s)) for r, s in money])


def correct(name: str, seen: int, right: int) -> bool:
    """Set what a budget's window has spent, if it still is what was seen. Raises Away."""
    changed, _reserved, _spent = _call("correct", [name, str(seen), str(right)])
    return bool(changed)


@cache
def _library() -> Library:
    return Library()


def _call(function: str, args: list[Any]) -> list[Any]:
    library = _library()
    packed = msgspec.msgpack.encode(args)
    try:
        with live.client() as valkey:
            try:
                answer = valkey.execute_command("FCALL", f"{library.name}_{function}", 0, packed)
            except redis.ResponseError as error:
                if "not found" not in str(error):
                    raise
                valkey.execute_command("FUNCTION", "LOAD", "REPLACE", library.source)
                answer = valkey.execute_command("FCALL", f"{library.name}_{function}", 0, packed)
        found: list[Any] = msgspec.msgpack.decode(answer)
    except (redis.RedisError, OSError, msgspec.DecodeError) as error:
        raise Away(f"Valkey does not tell what is used: {type(error).__name__}") from error
    return found
