"""The state of one client call, from its first byte until it is settled."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import uuid_utils

from serving.coordination.contract import Place
from serving.errors import GatewayError
from serving.metering import Counts
from serving.port import Outcome, Price, Principal, Replica, Route, Snapshot
from serving.routing import NO_HINTS, Decision
from serving.schemas import Ask
from serving.telemetry.timeline import Anchor, EngineReport, FailedAttempt, Stamps
from serving.telemetry.tracing import TraceContext

if TYPE_CHECKING:
    from serving.capture import Capture
    from serving.relay import Relay

MAX_GAPS = 1500
GAP_UNIT_NS = 100_000


class Arrival:
    """What is known of a call before its key is: the id it will have, when it came, which trace it belongs to."""

    __slots__ = ("anchor", "client_request_id", "id", "received", "started_at", "trace", "uuid")

    def __init__(self, trace: TraceContext, client_request_id: str = "") -> None:
        self.received = time.monotonic_ns()
        self.anchor = Anchor(time.time_ns(), self.received)
        made = uuid_utils.uuid7()
        self.id = str(made)
        self.uuid = made.bytes
        self.started_at = made.timestamp / 1000
        self.trace = trace
        self.client_request_id = client_request_id


class Gaps:
    """Times between chunks with text, in units of 100 microseconds."""

    __slots__ = ("dropped", "last", "longest", "values")

    def __init__(self) -> None:
        self.values: list[int] = []
        self.dropped = 0
        self.longest = 0
        self.last = 0

    def note(self, now: int, pieces: int) -> None:
        """`pieces` came with one read: the first after a gap, the others with none."""
        for _ in range(pieces):
            if self.last:
                gap = (now - self.last + GAP_UNIT_NS // 2) // GAP_UNIT_NS
                self.longest = max(self.longest, gap)
                if len(self.values) < MAX_GAPS:
                    self.values.append(gap)
                else:
                    self.dropped += 1
            self.last = now


class Request:
    """One authenticated client call. Owned by the task that serves it; `cut` is how anybody else ends it."""

    def __init__(self, arrival: Arrival, principal: Principal, endpoint: str, snapshot: Snapshot) -> None:
        self.arrival = arrival
        self.id = arrival.id
        self.principal = principal
        self.endpoint = endpoint
        self.snapshot = snapshot
        self.stamps = Stamps(received=arrival.received)
        self.ask: Ask | None = None
        self.route: Route | None = None
        self.price: Price | None = None  # fixed at admission
        self.model = ""
        self.end_user = ""
        # dispatch
        self.replica: Replica | None = None
        self.decision: Decision | None = None
        self.hints = NO_HINTS
        self.place: Place | None = None  # in the queue, when it came to wait there
        self.retries = 0  # how often its client has sent it before
        self.claimed = False  # the coordinator holds something for it
        self.decided_at = 0
        self.decided_in = 0
        self.attempts = 0
        self.failed: list[FailedAttempt] = []
        self.slot: int | None = None
        # what came back
        self.counts = Counts()
        self.gaps = Gaps()
        self.report: EngineReport | None = None
        self.finish_reason = ""
        self.capture: Capture | None = None  # only where the tenant keeps its words
        self.started = False  # part of the answer may be with the client: no retry from here on
        # the end
        self.outcome = Outcome.OK
        self.status = 200
        self.error: GatewayError | None = None
        self.cut_by: GatewayError | None = None
        self._closing = False
        self._leader: Relay | None = None
        self._task: asyncio.Task[Any] | None = None

    # the way in

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """The current task serves this request; one that was cut before it began ends at its first wait."""
        self._task = asyncio.current_task(loop)
        if self.cut_by is not None and self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """It is settled: let go of the task, which still holds the request."""
        self._task = None
        self._leader = None

    def take(self, ask: Ask) -> None:
        self.ask = ask
        self.model = ask.model

    # while it runs

    def cut(self, error: GatewayError) -> None:
        """End the request from outside. The first reason counts, and none once all is delivered or it is ending."""
        if self._closing or self.stamps.delivered or self.cut_by is not None:
            return
        self.cut_by = error
        if self._task is not None:
            self._task.cancel()

    def note_failure(self, error: GatewayError, now: int) -> None:
        """An attempt failed."""
        assert self.replica is not None
        cause = type(error.__cause__).__name__ if error.__cause__ else ""
        told = f"{error.code}: {cause}" if cause else error.code
        self.failed.append(FailedAttempt(self.replica.id, told, self.stamps.routed, now))

    def forget_attempt(self) -> None:
        """It failed before the client had a byte, and another follows: nothing that it brought counts."""
        self.counts = Counts()
        self.gaps = Gaps()
        self.report = None
        self._leader = None
        if self.capture is not None:
            self.capture.reset()
        self.stamps.posted = self.stamps.first_chunk = self.stamps.last_chunk = 0

    def leads(self, relay: Relay) -> bool:
        """Whether this relay may answer: the first one with text does, and no other after it."""
        if self._leader is None:
            self._leader = relay
            self.adopt(relay)
        return self._leader is relay

    def adopt(self, relay: Relay) -> None:
        """What this relay counts is what the request comes to."""
        self.counts = relay.counts
        self.gaps = relay.gaps

    # the way out

    def close(self, error: GatewayError | None) -> None:
        """It is ending: how, for the record. From here on nothing cuts it."""
        self._closing = True
        self.error = error
        if error is not None:
            self.outcome = error.outcome
            if not self.started:
                self.status = error.status

    @property
    def left(self) -> bool:
        """Whether the client has gone, so that there is nobody to tell."""
        return self.outcome in (Outcome.CANCELLED, Outcome.SLOW_READER)
