"""The one path that every request takes, whoever calls: admit, queue and route, forward, stream, settle.

`Run.serve` has one way out. However the work ends (done, refused, broken, timed out, the client gone, the process
stopping) the engine's connection is closed first, which is the abort; then the client is told, if it is there; then the
request is settled by code that does not await, so that nothing can come between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time

from serving import admission, apikey, auth, claims, dispatch, routing, starting
from serving.admission import Admission
from serving.answer import Answer
from serving.attempt import Attempt
from serving.caller import Caller
from serving.capture import Capture
from serving.coordination.contract import Coordinator, Granted, Place, QueueTimeout, Refused, Used, Waiting
from serving.errors import (
    EngineBusy,
    GatewayError,
    Internal,
    ShuttingDown,
    Unavailable,
    UpstreamFailed,
)
from serving.folding import Folding
from serving.hedge import Hedge
from serving.journal import Journal
from serving.metering import Billed, billed, cost
from serving.port import GatewaySettings, LiveState, Outcome, Replica
from serving.relay import Relay
from serving.replicas import ReplicaPool
from serving.request import GAP_UNIT_NS, Request
from serving.router import Plan, Router
from serving.shadow import Shadows
from serving.snapshot import Configuration
from serving.starting import Start, Starts
from serving.telemetry import record, timeline
from serving.telemetry.metrics import Metrics
from serving.watch import Watch

log = logging.getLogger(__name__)

TELL_TIMEOUT_S = 3.0
BACKOFF_S = 0.05  # doubled each time, and jittered


class Pipeline:
    """What all requests share."""

    def __init__(
        self,
        settings: GatewaySettings,
        configuration: Configuration,
        live: LiveState,
        journal: Journal,
        metrics: Metrics,
        pool: ReplicaPool,
        coordinator: Coordinator,
    ) -> None:
        self.settings = settings
        self.configuration = configuration
        self.journal = journal
        self.folding = Folding(journal)
        self.metrics = metrics
        self.pool = pool
        self.coordinator = coordinator
        self.router = Router(configuration, live, pool, coordinator)
        self.admission = Admission(settings)
        self.shadows = Shadows(self)
        self.starts = Starts(configuration, coordinator)
        self.in_flight: dict[str, Request] = {}
        self.watched: dict[str, Watch] = {}
        self.stopping = False
        self.boot = timeline.boot_id()
        # looking the running loop up asks the kernel for the process each time
        self.loop = asyncio.get_running_loop()

    async def serve(self, request: Request, caller: Caller) -> None:
        """Serve one authenticated request to its end; it leaves exactly one Settled behind."""
        await Run(self, request, caller).serve()

    async def pause(self, phase: str) -> None:
        """The testing hook that makes one phase longer."""
        delay = self.settings.fault_delays.get(phase)
        if delay:
            await asyncio.sleep(delay)

    def check_deadlines(self) -> None:
        """Cut what is over its time. One look at all requests, now and then, costs less than timers for each."""
        now = time.monotonic_ns()
        for watch in list(self.watched.values()):
            watch.check(now)

    def check_open(self) -> None:
        """Refuse new work while stopping, on an outdated configuration, or over the gateway's own bounds."""
        if self.stopping:
            raise Unavailable("The gateway is shutting down.", code="server_shutting_down", retry_after=1)
        self.configuration.current()
        self.admission.check_capacity(len(self.in_flight))


class Run:
    """One request on its way through the pipeline."""

    def __init__(self, pipeline: Pipeline, request: Request, caller: Caller) -> None:
        self._pipeline = pipeline
        self._request = request
        self._caller = caller
        self._answer: Answer | None = None
        self._attempt: Attempt | None = None
        self._watch: Watch | None = None
        self._opened_for: Replica | None = None
        self._queue_until = 0.0  # by the monotonic clock

    async def serve(self) -> None:
        request = self._request
        request.begin(self._pipeline.loop)
        self._pipeline.in_flight[request.id] = request
        error: GatewayError | None = None
        cancelled: asyncio.CancelledError | None = None
        try:
            await self._work()
        except GatewayError as refused:
            error = refused
        except asyncio.CancelledError as cancel:
            error, cancelled = self._why_cancelled(cancel)
        except Exception:
            log.exception("request %s: unhandled", request.id)
            error = Internal()
        request.close(error)
        self._let_go(error)
        try:
            if error is not None:
                await self._tell(error)
            if self._pipeline.settings.fault_delays:
                await self._pipeline.pause("settle")
        finally:
            self._settle()
        if cancelled is not None:
            raise cancelled

    # ---- the work

    async def _work(self) -> None:
        request, pipeline, stamps = self._request, self._pipeline, self._request.stamps
        pipeline.check_open()
        body = await self._caller.body()
        await pipeline.pause("receive")
        stamps.body = time.monotonic_ns()
        await pipeline.pause("admission")
        self._admit(body)
        stamps.admitted = time.monotonic_ns()
        self._watch = Watch(request, self._caller)
        pipeline.watched[request.id] = self._watch
        replica = await self._claim(body)
        self._answer = self._caller.answer(request)
        await self._generate(replica, self._answer)

    def _admit(self, body: bytes) -> None:
        request = self._request
        ask = self._caller.dialect.parse(body)
        request.take(ask)
        if ask.user:
            secret = self._pipeline.settings.secret
            request.end_user = apikey.end_user(request.principal.tenant_id, ask.user, secret)
        auth.check_valid(request.principal)
        request.route = admission.admit(ask, request.principal, request.snapshot)
        request.price = request.route.prices.get(request.principal.currency)
        request.hints = routing.permitted(self._caller.hints(), request.principal)
        if request.principal.capture_content:
            request.capture = Capture(ask)

    # ---- queue and route

    async def _claim(self, body: bytes) -> Replica:
        """Limits, a place in the queue and a slot of a replica, in one decision."""
        request, pipeline = self._request, self._pipeline
        assert request.route is not None
        await pipeline.pause("routing")
        began = time.monotonic()
        plan = await self._first_plan()
        # Who waited for the next replica has waited in this queue; who held for a start has not.
        since = time.monotonic() if request.route.on_stopped == "hold" else began
        self._queue_until = since + request.route.queue_timeout_s
        claim = claims.claim(request, plan.pool, plan.ranking, body)
        request.claimed = True
        verdict = await pipeline.coordinator.admit(claim)
        self._caller.announce(claims.headers(verdict))
        if isinstance(verdict, Refused):
            request.claimed = False
            raise claims.refusal(verdict, request.principal.currency)
        request.retries = max(verdict.retries, request.hints.retry)
        replica = await self._granted(plan, verdict)
        for deployment_id in plan.choice.shadows:
            if self._caller.dialect.generates:
                pipeline.shadows.send(request, self._caller.dialect, deployment_id)
        return replica

    async def _first_plan(self) -> Plan:
        """A plan; where what it needs sleeps, that is woken, and waited for where the route says so."""
        request, starts = self._request, self._pipeline.starts
        assert request.route is not None
        try:
            return self._plan()
        except Unavailable:
            start = starts.coming(request.route)
            if start is None:
                raise
        await self._within_limits(start)
        start = starts.look(request.route) or start
        if not starting.patience_s(request.route, start):
            raise starting.refusal(start)
        with starts.holding(request.route, start):
            self._note_opened(None)
            return await self._held(start)

    async def _within_limits(self, start: Start) -> None:
        """Who is over a limit wakes nothing and takes nobody's place among those that wait for a start."""
        claim = claims.limits_claim(self._request, start.deployment.id)
        verdict = await self._pipeline.coordinator.admit(claim)
        if isinstance(verdict, Refused) and verdict.reason == "limit":
            self._caller.announce(claims.headers(verdict))
            raise claims.refusal(verdict, self._request.principal.currency)

    async def _held(self, start: Start) -> Plan:
        """The plan once what starts is ready. Raises Unavailable when the route's patience ends."""
        request, starts = self._request, self._pipeline.starts
        assert request.route is not None
        until = time.monotonic() + starting.patience_s(request.route, start)
        request.stamps.held = time.monotonic_ns()
        try:
            while True:
                self._caller.starting(start.eta_s)
                await starts.news()
                with contextlib.suppress(Unavailable):
                    return self._plan()
                start = starts.look(request.route) or start
                if time.monotonic() > until:
                    raise starting.refusal(start)
        finally:
            request.stamps.awake = time.monotonic_ns()

    async def _move(self, error: GatewayError) -> Replica:
        """A slot elsewhere for another attempt, after a moment; `error` counts where nobody else can be asked."""
        request = self._request
        if not isinstance(error, EngineBusy):
            backoff = BACKOFF_S * 2 ** (request.attempts - 1)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        try:
            plan = self._plan()
            asked = {attempt.replica_id for attempt in request.failed}
            if isinstance(error, EngineBusy) and plan.ranking.ranked[0].replica.id in asked:
                raise error
            offered = claims.offered(plan.ranking)
            verdict = await self._pipeline.coordinator.move(request.id, plan.pool, offered, least=plan.ranking.least)
            return await self._granted(plan, verdict)
        except Unavailable:
            raise error from None

    def _plan(self) -> Plan:
        began = time.monotonic_ns()
        plan = self._pipeline.router.plan(self._request)
        self._request.decided_in = time.monotonic_ns() - began
        if not plan.ranking.ranked:
            self._request.decided_at = time.monotonic_ns()
            self._request.decision = routing.decided(plan.ranking, None, target=plan.choice)
            raise Unavailable(
                f"No replica can take this request: {self._request.decision.reason}.", code="no_ready_replica"
            )
        return plan

    async def _granted(self, plan: Plan, verdict: Granted | Waiting) -> Replica:
        request, stamps = self._request, self._request.stamps
        stamps.claimed = time.monotonic_ns()
        await self._pipeline.pause("queue")
        if isinstance(verdict, Waiting):
            request.place = Place(verdict.position, verdict.depth)
            self._caller.queued(request.place)
            self._note_opened(None)
            verdict = await self._turn()
            stamps.granted = time.monotonic_ns()
        request.decision = routing.decided(plan.ranking, verdict.replica_id, verdict.in_use, target=plan.choice)
        replica = request.replica = plan.replicas[verdict.replica_id]
        assert request.ask is not None
        dispatch.check_extras(request.ask, replica)
        stamps.routed = request.decided_at = time.monotonic_ns()
        return replica

    async def _turn(self) -> Granted:
        request = self._request
        try:
            return await self._pipeline.coordinator.granted(request.id, self._queue_until - time.monotonic())
        except QueueTimeout as timeout:
            assert request.route is not None
            raise Unavailable(
                f"No replica had room within {request.route.queue_timeout_s:g} seconds; {timeout.depth} requests wait.",
                code="queue_timeout",
                retry_after=timeout.retry_after_s,
            ) from None

    # ---- generate

    async def _generate(self, replica: Replica, answer: Answer) -> None:
        """Try replicas until one answers; never again once the client may have seen a byte."""
        request, pipeline = self._request, self._pipeline
        while True:
            try:
                await self._attempt_on(replica, answer)
            except (UpstreamFailed, EngineBusy) as error:
                self._note_failure(replica, error)
                if not self._may_retry():
                    raise
                pipeline.metrics.retried(replica.id, error.code)
                answer.reset()
                request.forget_attempt()
                replica = await self._move(error)
            else:
                return

    async def _attempt_on(self, replica: Replica, answer: Answer) -> None:
        request, pipeline, dialect = self._request, self._pipeline, self._caller.dialect
        self._note_opened(replica)
        if pipeline.settings.fault_delays:
            await pipeline.pause("connect")
        attempt = self._attempt = Attempt(request, replica, dialect, pipeline.pool)
        pipeline.router.sent(request, replica)
        try:
            await self._exchange(attempt, replica, answer)
        except GatewayError as error:
            pipeline.router.went(replica, error, None)
            raise
        except asyncio.CancelledError:
            pipeline.router.went(replica, request.cut_by or ShuttingDown(), None)
            raise

    async def _exchange(self, attempt: Attempt, replica: Replica, answer: Answer) -> None:
        """Ask the engine and hand its answer over."""
        request, pipeline, dialect = self._request, self._pipeline, self._caller.dialect
        assert request.ask is not None
        secret = pipeline.settings.secret
        in_one_piece = replica.engine == "external" and not request.ask.stream and not request.ask.stops
        if dialect.whole is not None and (in_one_piece or not dialect.generates):
            assert self._watch is not None
            self._watch.expects_tokens = False
            reply = await attempt.whole(pipeline.journal.slots, secret)
            await self._engine_ended(replica, reply.finish_reason)
            await self._caller.deliver(reply.body, request)
        else:
            relay = await self._stream(attempt, answer)
            assert request.replica is not None
            await self._engine_ended(request.replica, relay.finish_reason)
            await answer.finish(self._usage())

    async def _stream(self, attempt: Attempt, answer: Answer) -> Relay:
        request, pipeline = self._request, self._pipeline
        assert request.route is not None
        if request.route.hedge_after_s is not None:
            hedge = Hedge(pipeline, request, self._caller.dialect, answer)
            return await hedge.stream(attempt, request.route.hedge_after_s)
        return await attempt.stream(answer, pipeline.journal.slots, pipeline.settings.secret)

    async def _engine_ended(self, replica: Replica, finish_reason: str) -> None:
        """The answer is complete: only its client can still spoil it."""
        assert self._watch is not None
        self._watch.engine_ended()
        stamps = self._request.stamps
        self._pipeline.router.went(replica, None, (stamps.first_chunk - stamps.posted) / 1e9)
        self._request.finish_reason = finish_reason
        if self._pipeline.settings.fault_delays:
            await self._pipeline.pause("deliver")

    def _may_retry(self) -> bool:
        request = self._request
        assert request.route is not None
        if request.started or request.attempts >= request.route.max_attempts:
            return False
        return self._pipeline.router.health.may_retry(time.monotonic())

    def _note_failure(self, replica: Replica, error: GatewayError) -> None:
        request = self._request
        request.note_failure(error, time.monotonic_ns())
        log.warning("request %s: %s: %s", request.id, replica.id, request.failed[-1].error)

    def _note_opened(self, replica: Replica | None) -> None:
        """Journal the request before it waits for a replica, and before its first dispatch."""
        request, journal = self._request, self._pipeline.journal
        if request.slot is not None and (self._opened_for or replica is None):
            return
        self._opened_for = replica
        try:
            if request.slot is None:
                request.slot = journal.slots.claim(request.arrival.uuid)
            journal.open(dispatch.opened(request, replica, self._pipeline.settings))
        except OSError as error:
            log.error("journal: cannot note a request: %s", error)
            raise Unavailable("The gateway cannot meter requests now.", code="journal_unwritable") from error

    # ---- the end

    def _why_cancelled(self, cancel: asyncio.CancelledError) -> tuple[GatewayError, asyncio.CancelledError | None]:
        """Ours to handle if `cut` did it; else the server stops and cancels its tasks, and this one must end."""
        if self._request.cut_by is not None:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            return self._request.cut_by, None
        return ShuttingDown(), cancel

    def _let_go(self, error: GatewayError | None) -> None:
        if error is not None and self._attempt is not None:
            self._attempt.abort()
        if self._watch is not None:
            del self._pipeline.watched[self._request.id]
            self._watch.end()
        if self._answer is not None and self._request.left:
            self._answer.abandon()

    async def _tell(self, error: GatewayError) -> None:
        """Tell the client what went wrong, if it is there to listen. Whatever happens here, settling follows."""
        request, answer = self._request, self._answer
        if request.left:
            return
        try:
            async with asyncio.timeout(TELL_TIMEOUT_S):
                await (answer.fail(error) if answer is not None else self._caller.refuse(error))
            request.stamps.delivered = time.monotonic_ns()
        except (GatewayError, OSError) as unreachable:
            log.info("request %s: nobody to tell: %s", request.id, unreachable)
        if answer is not None:
            answer.abandon()

    def _settle(self) -> None:
        """The one finaliser. It does not await, so it cannot be interrupted."""
        request, pipeline = self._request, self._pipeline
        request.stamps.settled = time.monotonic_ns()
        bill = billed(request.outcome, request.counts, delivered=request.started)
        try:
            entry = record.settled(request, bill, pipeline.settings, pipeline.boot)
        except Exception:
            log.exception("request %s: its record could not be made", request.id)
            entry = record.bare(request, bill, pipeline.settings)
        if request.outcome is Outcome.REJECTED and request.slot is None:
            pipeline.folding.note(entry, request.stamps.settled // 10**9)
        else:
            pipeline.journal.settle(entry, request.slot)
        if request.claimed:
            pipeline.coordinator.settle(request.id, self._used(bill))
        del pipeline.in_flight[request.id]
        request.end()
        pipeline.metrics.settled(entry, request.gaps.values, GAP_UNIT_NS / 1e9)

    def _used(self, bill: Billed) -> Used | None:
        """What the limits are corrected to; None where it never came to be dispatched."""
        if self._request.attempts == 0:
            return None
        return Used(bill.prompt, bill.completion, cost(bill, self._request.price))

    def _usage(self) -> Billed:
        counts = self._request.counts
        return Billed(counts.prompt, counts.cached, counts.generated, counts.reasoning)
