"""What this process knows of a request that it asked for and has not settled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from serving.coordination import wire
from serving.coordination.contract import Claim, Granted, Place, Slots, Waiting


class Held:
    """One request, from its claim until it is settled."""

    __slots__ = (
        "asking",
        "budgets",
        "candidates",
        "claim",
        "first",
        "granted",
        "least",
        "level",
        "place",
        "pool",
        "slots",
        "waiter",
        "waiting",
        "windows_at",
    )

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.pool = claim.pool
        self.candidates = claim.candidates
        self.least = claim.least
        self.level = claim.priority + 1  # its class in the queue; 0 after it moved
        self.windows_at = 0.0  # when it was asked for: the windows of budgets that it draws on
        self.budgets: list[str] = []  # their names
        self.asking = True  # an answer to admit or move is on its way
        self.first = True  # that is the answer to admit
        self.granted: Granted | None = None
        self.slots = 0
        self.waiting: Waiting | None = None
        self.waiter: asyncio.Future[Granted] | None = None
        self.place: Place | None = None

    def arguments(self, process: str, epoch: int, scopes: wire.Scopes, processes: int, sharers: int) -> list[Any]:
        """Arguments of `admit`, for where it may run by now: limits divided by `processes`, slots by `sharers`."""
        args = wire.admit(self.claim, process, epoch, scopes, self.windows_at, processes, sharers)
        self.budgets = [budget[0] for limits in args[wire.SCOPES] for budget in limits[6]]
        if not self.first:
            args[wire.POOL] = self.pool
            args[wire.CANDIDATES] = wire.candidates(self.candidates, sharers)
            args[wire.LEAST] = self.least
            args[wire.CLASS] = self.level
        return args

    def entry(self, process: str, epoch: int, scopes: wire.Scopes, processes: int, sharers: int) -> list[Any]:
        """What `restore` puts back: [arguments, replica or "", slots]."""
        replica = self.granted.replica_id if self.granted else ""
        return [self.arguments(process, epoch, scopes, processes, sharers), replica, self.slots]

    def moved(self, pool: str, candidates: tuple[Slots, ...], least: bool) -> None:
        """It asks for another attempt; one that ran before goes ahead of who waits."""
        if self.granted:
            self.level = 0
        self.pool, self.candidates, self.least = pool, candidates, least

    def decided(self, reply: Sequence[Any]) -> Granted | Waiting:
        """Take the answer of admit or move that let it in."""
        outcome = wire.decision(reply, self.candidates)
        self.asking = self.first = False
        if isinstance(outcome, Granted):
            self.granted, self.slots, self.waiting, self.place = outcome, reply[2], None, None
        elif isinstance(outcome, Waiting):
            self.granted, self.slots, self.waiting = None, 0, outcome
            self.place = Place(outcome.position, outcome.depth)
            self.waiter = None
        else:
            raise ValueError(f"the answer {reply[0]!r} lets nobody in")
        return outcome

    def turn_came(self, replica: str, slots: int, in_use: Sequence[int]) -> Granted:
        """It waited and has been given slots."""
        told = self.waiting
        granted = self.granted = Granted(
            replica_id=replica,
            in_use=wire.in_use(self.candidates, in_use),
            requests=told.requests if told else None,
            tokens=told.tokens if told else None,
            retries=told.retries if told else 0,
        )
        self.slots, self.waiting, self.place = slots, None, None
        if self.waiter and not self.waiter.done():
            self.waiter.set_result(granted)
        return granted
