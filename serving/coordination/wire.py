"""What is said to the library: the arguments of `admit` by position, and how claims and answers are put into them.

The functions and their answers are described in `library/`; the model answers the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from serving.coordination.calendar import KEPT, Calendar
from serving.coordination.contract import Allowance, Claim, Granted, Refused, Scope, Slots, Waiting
from serving.port import Limits

PROCESS, EPOCH, ID, SCOPES, INPUT, OUTPUT, COST = range(7)
POOL, CANDIDATES, LEAST, SLOTS = range(7, 11)
TENANT, WEIGHT, CLASS, MAX_QUEUED, MAX_TOKENS, FINGERPRINT = range(11, 17)


def share(limit: int | None, processes: int) -> int:
    """One process's part of a limit, at least 1; -1 where there is none. A limit of 0 stays 0."""
    if limit is None:
        return -1
    return max(1, limit // processes) if limit else 0


def scope_name(kind: str, identity: str) -> str:
    return f"{kind}:{identity}"


def budgets(scope: Scope, currency: str, zone: str, calendar: Calendar, now: float) -> list[list[Any]]:
    """[[name, window, amount, start, end], ...], windows around `now`. A name is what `read` and `correct` take."""
    found = []
    for budget in scope.limits.budgets:
        start, end = calendar.window(budget.window, zone, now)
        name = f"{scope_name(scope.kind, scope.id)}:{currency}:{budget.window}:{start}"
        found.append([name, budget.window, budget.amount, start, end])
    return found


def scope(scope: Scope, money: list[list[Any]], processes: int = 1) -> list[Any]:
    """[name, four rates, concurrency, budgets]; -1: no such limit."""
    limits: Limits = scope.limits
    rates = (
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.input_tokens_per_minute,
        limits.output_tokens_per_minute,
        limits.concurrency,
    )
    shares = [[name, window, amount // processes, *bounds] for name, window, amount, *bounds in money]
    return [scope_name(scope.kind, scope.id), *(share(limit, processes) for limit in rates), shares]


class Scopes:
    """Scopes as they are sent, remembered while their limits and the windows of their budgets last."""

    def __init__(self) -> None:
        self._calendar = Calendar()
        self._kept: dict[tuple[str, str, str, str, int], tuple[Limits, float, float, list[Any]]] = {}

    def sent(self, asked: Scope, currency: str, zone: str, now: float, processes: int) -> list[Any]:
        """`scope` for the windows around `now`. It is shared: nobody may change it."""
        key = (asked.kind, asked.id, currency, zone, processes)
        kept = self._kept.get(key)
        if kept and kept[0] is asked.limits and kept[1] <= now < kept[2]:
            return kept[3]
        if len(self._kept) >= KEPT:
            self._kept.clear()
        money = budgets(asked, currency, zone, self._calendar, now)
        begin = max((start for _, _, _, start, _ in money), default=0)
        end = min((end for _, window, _, _, end in money if window != "total"), default=math.inf)
        made = scope(asked, money, processes)
        self._kept[key] = asked.limits, begin, end, made
        return made


def candidates(slots: Sequence[Slots], processes: int = 1) -> list[list[Any]]:
    """[[replica, slots of it], ...]; 0: unbounded."""
    return [[replica.replica_id, max(1, replica.total // processes) if replica.total else 0] for replica in slots]


def admit(
    claim: Claim, process: str, epoch: int, scopes: Scopes, now: float, processes: int = 1, sharers: int = 1
) -> list[Any]:
    """Arguments of `admit`. processes, sharers: by how many limits and slots are divided, where each has its share."""
    return [
        process,
        epoch,
        claim.id,
        [scopes.sent(each, claim.currency, claim.zone, now, processes) for each in claim.scopes],
        claim.input_tokens,
        claim.output_tokens,
        claim.cost,
        claim.pool,
        candidates(claim.candidates, sharers),
        claim.least,
        claim.slots,
        claim.tenant_id,
        claim.weight,
        claim.priority + 1,
        claim.max_queued,
        claim.max_queued_tokens,
        claim.fingerprint,
    ]


def decision(reply: Sequence[Any], slots: Sequence[Slots]) -> Granted | Waiting | Refused:
    """What the answer of `admit` or `move` says. slots: the candidates asked for."""
    kind = reply[0]
    if kind == "granted":
        return Granted(
            replica_id=reply[1],
            in_use=in_use(slots, reply[3]),
            requests=_allowance(reply[4]),
            tokens=_allowance(reply[5]),
            retries=reply[6],
        )
    if kind == "waiting":
        return Waiting(
            position=reply[1],
            depth=reply[2],
            in_use=in_use(slots, reply[3]),
            requests=_allowance(reply[4]),
            tokens=_allowance(reply[5]),
            retries=reply[6],
        )
    if kind == "full":
        return Refused(
            reason="queue_full",
            depth=reply[1],
            retry_after_s=reply[2],
            requests=_allowance(reply[3]),
            tokens=_allowance(reply[4]),
        )
    _, scope, limit, allowed, used, wanted, retry_after, retryable, requests, tokens = reply
    return Refused(
        reason="limit",
        scope=scope,
        limit=limit,
        allowed=allowed,
        used=used,
        wanted=wanted,
        retry_after_s=retry_after,
        retryable=retryable,
        requests=_allowance(requests),
        tokens=_allowance(tokens),
    )


def in_use(slots: Sequence[Slots], counts: Sequence[int]) -> dict[str, int]:
    return {replica.replica_id: count for replica, count in zip(slots, counts, strict=False)}


def pairs(flat: Sequence[str]) -> dict[str, int]:
    """A hash as Valkey tells it: name, value, name, value."""
    return {flat[index]: int(flat[index + 1]) for index in range(0, len(flat), 2)}


def _allowance(reply: Any) -> Allowance | None:
    return Allowance(*reply) if reply else None
