"""What the console asks and corrects: use of limits, money, queues and slots. Each question has its own connection."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from serving.coordination.library import Library
from serving.coordination.valkey import Address, Away, connect
from serving.coordination.wire import pairs, scope_name


class ScopeUse(msgspec.Struct, frozen=True):
    """What a key or tenant uses of its limits: the last 60 seconds, and what is admitted and not settled."""

    requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int


class BudgetUse(msgspec.Struct, frozen=True):
    """Whole nano-units, in one window of one budget."""

    name: str  # see `wire.budgets`
    reserved: int
    spent: int


class Readings(msgspec.Struct, frozen=True):
    """As asked for, at one moment."""

    now: float  # seconds since the epoch, by the clock that limits go by
    scopes: Sequence[ScopeUse]  # in the order asked for
    budgets: Sequence[BudgetUse]  # likewise
    waiting: Mapping[str, int]  # requests by pool
    slots: Mapping[str, int]  # in use by replica


async def read(url: str, scopes: Sequence[tuple[str, str]], budgets: Sequence[str] = ()) -> Readings:
    """Use of scopes, as (kind, id), and of budgets, by name; and all queues and slots. Raises Away."""
    names = [scope_name(kind, identity) for kind, identity in scopes]
    now, uses, money, depths, slots = await _ask(url, "read", [names, list(budgets)])
    return Readings(
        now=now,
        scopes=[ScopeUse(*use) for use in uses],
        budgets=[
            BudgetUse(name, int(reserved), int(spent)) for name, (reserved, spent) in zip(budgets, money, strict=True)
        ],
        waiting=pairs(depths),
        slots=pairs(slots),
    )


async def correct(url: str, name: str, *, read: int, right: int) -> bool:
    """Set what a budget has spent to `right` if it still is what was `read`. Raises Away."""
    changed, _, _ = await _ask(url, "correct", [name, str(read), str(right)])
    return bool(changed)


async def _ask(url: str, function: str, args: list[Any]) -> list[Any]:
    address = Address(url)
    link = await connect(address, Library(), f"fl:g:c:reader-{uuid.uuid4().hex}", lambda _: None, lambda: None)
    answered: asyncio.Future[list[Any] | None] = asyncio.get_running_loop().create_future()
    try:
        link.call(function, args, answered.set_result)
        reply = await answered
    finally:
        link.close()
    if reply is None:
        raise Away(f"Valkey at {address} did not answer.")
    return reply
