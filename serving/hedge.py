"""A second copy of a request whose first token is late: whoever has text first answers, the other is told to stop.

Optional per route (`hedge_after_s`). The copy takes a slot only where one is free at another replica, counts against no
limit, and is never billed: a request is billed for the answer that its client got.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from serving import claims, routing
from serving.answer import Answer
from serving.attempt import Attempt
from serving.coordination.contract import Granted
from serving.dialect import Dialect
from serving.errors import GatewayError
from serving.port import Replica
from serving.relay import Relay, Superseded
from serving.request import Request

if TYPE_CHECKING:
    from serving.pipeline import Pipeline


class Hedge:
    """The race of one request."""

    def __init__(self, pipeline: Pipeline, request: Request, dialect: Dialect, answer: Answer) -> None:
        self._pipeline = pipeline
        self._request = request
        self._dialect = dialect
        self._answer = answer
        self._claim_id = ""

    async def stream(self, first: Attempt, after_s: float) -> Relay:
        """Stream from `first`, or from who overtakes it. Raises what went wrong where neither answers."""
        slots, secret = self._pipeline.journal.slots, self._pipeline.settings.secret
        running = {asyncio.create_task(first.stream(self._answer, slots, secret)): first}
        try:
            await asyncio.wait(running, timeout=after_s)
            if not self._request.stamps.first_chunk and not next(iter(running)).done():
                second = await self._second(first.replica)
                if second is not None:
                    running[asyncio.create_task(second.stream(self._answer, slots, secret, leads=False))] = second
            return await self._winner(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if self._claim_id:
                self._pipeline.coordinator.settle(self._claim_id, None)

    async def _winner(self, running: dict[asyncio.Task[Relay], Attempt]) -> Relay:
        failure: GatewayError | None = None
        pending = set(running)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    relay = task.result()
                except Superseded:
                    continue
                except GatewayError as error:
                    failure = failure or error
                    if self._request.started:
                        raise
                else:
                    self._request.replica = running[task].replica
                    return relay
        assert failure is not None
        raise failure

    async def _second(self, first: Replica) -> Attempt | None:
        """An attempt at another replica; None where none has a free slot."""
        request, pipeline = self._request, self._pipeline
        plan = pipeline.router.plan(request, avoid=(first.id,))
        others = [each for each in plan.ranking.ranked if each.replica.id != first.id]
        if not others or len(others) != len(plan.ranking.ranked):
            return None
        self._claim_id = f"{request.id}-hedge"
        verdict = await pipeline.coordinator.admit(claims.slot_claim(request, self._claim_id, plan.pool, plan.ranking))
        if not isinstance(verdict, Granted):
            return None
        replica = plan.replicas[verdict.replica_id]
        request.decision = routing.decided(plan.ranking, replica.id, verdict.in_use, target=plan.choice)
        pipeline.router.sent(request, replica)
        pipeline.metrics.hedged(replica.id)
        return Attempt(request, replica, self._dialect, pipeline.pool)
