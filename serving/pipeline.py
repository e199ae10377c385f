"""The one path that every request takes, whoever calls: admit, route, forward, stream, settle.

`Run.serve` has one way out. However the work ends (done, refused, broken, timed out, the client gone, the process
stopping) the engine's connection is closed first, which is the abort; then the client is told, if it is there; then the
request is settled by code that does not await, so that nothing can come between.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

import msgspec

from serving import admission, apikey, auth, dispatch, routing, upstream
from serving.admission import Admission
from serving.answer import Answer
from serving.caller import Caller
from serving.errors import (
    GatewayError,
    Internal,
    ShuttingDown,
    TransportFault,
    Unavailable,
    UpstreamFailed,
)
from serving.journal import Journal
from serving.metering import Billed
from serving.port import GatewaySettings, LiveState, Replica
from serving.replicas import ReplicaPool
from serving.request import GAP_UNIT_NS, Request
from serving.snapshot import Configuration
from serving.stream import Editor, Piece
from serving.telemetry import record, timeline
from serving.telemetry.metrics import Metrics
from serving.telemetry.timeline import EngineReport
from serving.upstream import DONE, Chunk, EngineStream
from serving.watch import Watch

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
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
    ) -> None:
        self.settings = settings
        self.configuration = configuration
        self.live = live
        self.journal = journal
        self.metrics = metrics
        self.pool = pool
        self.admission = Admission(settings)
        self.in_flight: dict[str, Request] = {}
        self.stopping = False
        self.boot = timeline.boot_id()
        self._turn = 0

    async def serve(self, request: Request, caller: Caller) -> None:
        """Serve one authenticated request to its end; it leaves exactly one Settled behind."""
        await Run(self, request, caller).serve()

    async def pause(self, phase: str) -> None:
        """The testing hook that makes one phase longer."""
        delay = self.settings.fault_delays.get(phase)
        if delay:
            await asyncio.sleep(delay)

    def choose(self, request: Request) -> routing.Decision:
        """Ask routing, with the load of this moment; the newest Snapshot counts, also on a second attempt."""
        assert request.route is not None
        snapshot = self.configuration.peek()
        replicas = self.configuration.replicas(snapshot, request.route)
        candidates = [routing.Candidate(r, self.pool.in_flight(r.id), self.live.load(r.id)) for r in replicas]
        self._turn += 1
        avoid = [attempt.replica_id for attempt in request.failed]
        return routing.choose(request.route.policy, candidates, turn=self._turn, avoid=avoid)

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
        self._stream: EngineStream | None = None
        self._editor: Editor | None = None
        self._watch: Watch | None = None

    async def serve(self) -> None:
        request = self._request
        request.begin()
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
            await self._tell(error)
            await self._pipeline.pause("settle")
        finally:
            self._settle()
        if self._stream is not None:
            await self._stream.drain()
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
        self._answer = self._caller.answer(request)
        self._watch = Watch(request, self._caller)
        await self._generate(self._answer)
        self._watch.engine_ended()
        await pipeline.pause("deliver")
        assert self._editor is not None
        request.finish_reason = self._editor.finish_reason
        await self._answer.finish(self._usage())

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

    async def _generate(self, answer: Answer) -> None:
        """Try replicas until one answers; never again once the client may have seen a byte."""
        request = self._request
        while True:
            await self._route()
            try:
                await self._attempt(answer)
            except UpstreamFailed as error:
                request.note_failure(error, time.monotonic_ns())
                attempt = request.failed[-1]
                log.warning("request %s: %s: %s", request.id, attempt.replica_id, attempt.error)
                if request.started or request.attempts >= MAX_ATTEMPTS or not self._has_candidate():
                    raise
                self._pipeline.metrics.retried(attempt.replica_id, error.code)
                answer.reset()
                request.forget_attempt()
                self._update_slot()
                backoff = BACKOFF_S * 2 ** (request.attempts - 1)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            else:
                return

    async def _route(self) -> None:
        request = self._request
        await self._pipeline.pause("routing")
        began = time.monotonic_ns()
        decision = request.decision = self._pipeline.choose(request)
        request.decided_at = time.monotonic_ns()
        request.decided_in = request.decided_at - began
        request.replica = decision.replica
        if decision.replica is None:
            raise Unavailable(f"No replica can take this request: {decision.reason}.", code="no_ready_replica")
        assert request.ask is not None
        dispatch.check_extras(request.ask, decision.replica)
        request.stamps.routed = request.decided_at

    def _has_candidate(self) -> bool:
        return self._pipeline.choose(self._request).replica is not None

    async def _attempt(self, answer: Answer) -> None:
        request, pipeline = self._request, self._pipeline
        replica = request.replica
        assert replica is not None
        channel = await pipeline.pool.channel(replica)
        body, headers = dispatch.outgoing(request, replica, pipeline.settings.secret)
        self._note_opened(replica)
        request.attempts += 1
        await pipeline.pause("connect")
        request.stamps.posted = time.monotonic_ns()
        channel.in_flight += 1
        try:
            path = self._caller.dialect.upstream or self._caller.dialect.path
            self._stream = await upstream.open_stream(channel, path, body, headers)
            await self._relay(self._stream, answer)
        except BaseException:
            self._abort()
            raise
        finally:
            request.stamps.ended = time.monotonic_ns()
            await pipeline.pool.leave(channel)

    async def _relay(self, stream: EngineStream, answer: Answer) -> None:
        """Pass on what the engine says until it has finished or nothing more of it is wanted."""
        request = self._request
        assert request.ask is not None
        ask, stamps = request.ask, request.stamps
        editor = Editor(chat=self._caller.dialect.chat, choices=ask.choices, stops=ask.stops)
        self._editor = editor
        done = False
        while not done:
            payloads = await stream.read()
            if payloads is None:
                break
            stamps.last_chunk = time.monotonic_ns()
            heard = editor.heard
            pieces: list[Piece] = []
            for payload in payloads:
                if payload == DONE:
                    done = True
                    break
                pieces += self._take(upstream.parse_chunk(payload), editor)
            self._note_tokens(editor, editor.heard - heard)
            if pieces:
                answer.add(pieces)
            if editor.finished and editor.stopped_early:
                self._abort()  # a stop string ended it: the engine need not go on
                return
        if not editor.finished:
            raise TransportFault("The engine's stream ended before its answer did.")

    def _take(self, chunk: Chunk, editor: Editor) -> list[Piece]:
        request = self._request
        if chunk.usage is not None:
            choices = upstream.parse_choices(chunk.choices) if editor.several else []
            request.count(chunk.usage, choices)
        if chunk.fanlight:
            self._take_report(chunk.fanlight)
        return editor.edit(chunk.choices)

    def _take_report(self, raw: msgspec.Raw) -> None:
        """The engine's timeline is welcome and never essential: what cannot be read is left out."""
        try:
            report = msgspec.json.decode(raw, type=EngineReport)
        except (msgspec.DecodeError, RecursionError):
            log.warning("request %s: the engine's timeline cannot be read", self._request.id)
            return
        self._request.report = report.merged(self._request.report)

    def _note_tokens(self, editor: Editor, heard: int) -> None:
        """Count before anything is sent on, where it outlives this process."""
        request, counts = self._request, self._request.counts
        counts.relayed = editor.heard
        if heard:
            now = request.stamps.last_chunk
            request.stamps.first_chunk = request.stamps.first_chunk or now
            request.gaps.note(now, heard)
        self._update_slot()

    def _update_slot(self) -> None:
        request, counts = self._request, self._request.counts
        if request.slot is not None:
            self._pipeline.journal.slots.update(
                request.slot, request.arrival.uuid, counts.prompt, counts.cached, counts.generated
            )

    def _note_opened(self, replica: Replica) -> None:
        """Journal the request before its first dispatch."""
        request, journal = self._request, self._pipeline.journal
        if request.slot is not None:
            return
        try:
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

    def _abort(self) -> None:
        """Close the connection to the engine, which is how it learns to stop."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _let_go(self, error: GatewayError | None) -> None:
        if error is not None:
            self._abort()
        if self._watch is not None:
            self._watch.end()
        if self._answer is not None and self._request.left:
            self._answer.abandon()

    async def _tell(self, error: GatewayError | None) -> None:
        """Tell the client what went wrong, if it is there to listen. Whatever happens here, settling follows."""
        request, answer = self._request, self._answer
        if error is None or request.left:
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
        try:
            entry = record.settled(request, pipeline.settings, pipeline.boot)
        except Exception:
            log.exception("request %s: its record could not be made", request.id)
            entry = record.bare(request, pipeline.settings)
        pipeline.journal.settle(entry, request.slot)
        del pipeline.in_flight[request.id]
        pipeline.metrics.settled(entry, request.gaps.values, GAP_UNIT_NS / 1e9)

    def _usage(self) -> Billed:
        counts = self._request.counts
        return Billed(counts.prompt, counts.cached, counts.generated, counts.reasoning)
