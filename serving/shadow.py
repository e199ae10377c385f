"""Copies of requests for shadow targets: a canary that serves nobody yet. Not billed, answers dropped, records kept.

A copy takes a slot only where one is free, waits for nothing and is never tried again: what it costs must not be felt
by those who are served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from serving import claims, routing
from serving.attempt import Attempt
from serving.coordination.contract import Granted
from serving.dialect import Dialect
from serving.errors import DeadlineExceeded, GatewayError, Internal, ShuttingDown
from serving.metering import Billed
from serving.port import Replica
from serving.request import Arrival, Request
from serving.routing import Hints
from serving.stream import Piece
from serving.telemetry import record, tracing

if TYPE_CHECKING:
    from serving.pipeline import Pipeline

log = logging.getLogger(__name__)

MAX_COPIES = 64  # at once, in one process; more are not sent


class Shadows:
    """Sends copies in the background."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._running: set[asyncio.Task[None]] = set()

    def send(self, request: Request, dialect: Dialect, deployment_id: str) -> None:
        """Copy a request that has been granted a replica of its own."""
        if len(self._running) >= MAX_COPIES:
            return
        task = asyncio.create_task(self._run(_copied(request, deployment_id), dialect), name="shadow")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def stop(self) -> None:
        """End those still running; nobody waits for them."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, request: Request, dialect: Dialect) -> None:
        pipeline = self._pipeline
        plan = pipeline.router.plan(request)
        if not plan.ranking.ranked:
            return
        verdict = await pipeline.coordinator.admit(claims.slot_claim(request, request.id, plan.pool, plan.ranking))
        try:
            if isinstance(verdict, Granted):
                request.decision = routing.decided(plan.ranking, verdict.replica_id, verdict.in_use, target=plan.choice)
                await self._ask(request, plan.replicas[verdict.replica_id], dialect)
        finally:
            pipeline.coordinator.settle(request.id, None)

    async def _ask(self, request: Request, replica: Replica, dialect: Dialect) -> None:
        pipeline = self._pipeline
        assert request.route is not None
        request.replica = replica
        request.stamps.routed = time.monotonic_ns()
        error: GatewayError | None = None
        attempt = Attempt(request, replica, dialect, pipeline.pool)
        pipeline.router.sent(request, replica)
        try:
            async with asyncio.timeout(request.route.deadline_s):
                relay = await attempt.stream(Nowhere(request), pipeline.journal.slots, pipeline.settings.secret)
            request.finish_reason = relay.finish_reason
        except TimeoutError:
            error = DeadlineExceeded("The shadow took longer than its route allows.")
        except GatewayError as failed:
            error = failed
        except asyncio.CancelledError:
            error = ShuttingDown()
            raise
        except Exception:
            log.exception("shadow %s: unhandled", request.id)
            error = Internal()
        finally:
            pipeline.router.went(replica, error, None)
            request.close(error)
            self._record(request)

    def _record(self, request: Request) -> None:
        pipeline, counts = self._pipeline, request.counts
        request.stamps.delivered = request.stamps.ended
        request.stamps.settled = time.monotonic_ns()
        used = Billed(counts.prompt, counts.cached, counts.generated, counts.reasoning)
        entry = record.settled(request, used, pipeline.settings, pipeline.boot)
        pipeline.journal.settle(msgspec.structs.replace(entry, usage=None), None)


class Nowhere:
    """An Answer that is dropped; the first piece still stamps the time to the first token."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def add(self, pieces: list[Piece]) -> None:
        stamps = self._request.stamps
        stamps.first_sent = stamps.first_sent or time.monotonic_ns()

    def reset(self) -> None:
        """Never tried again."""

    async def finish(self, usage: Billed) -> None:
        """Nobody is told."""

    async def fail(self, error: GatewayError) -> None:
        """Nobody is told."""

    def abandon(self) -> None:
        """Nothing is on its way."""


def _copied(request: Request, deployment_id: str) -> Request:
    """The same question under an id of its own, without a price, for one deployment."""
    arrival = Arrival(tracing.continued(request.arrival.trace.header()))
    copy = Request(arrival, request.principal, request.endpoint, request.snapshot)
    assert request.ask is not None
    copy.take(request.ask)
    copy.route = request.route
    copy.hints = Hints(target=deployment_id, session=request.hints.session)
    now = time.monotonic_ns()
    copy.stamps.authenticated = copy.stamps.body = copy.stamps.admitted = now
    return copy
