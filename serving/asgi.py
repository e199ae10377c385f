"""The gateway put together: start it, call it, stop it. `Gateway.http` is the ASGI callable to mount."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator

from serving import auth
from serving.coordination import shared
from serving.coordination.contract import Coordinator
from serving.endpoints import health, models, openapi
from serving.endpoints.base import HttpCaller
from serving.endpoints.chat import CHAT
from serving.endpoints.completions import COMPLETIONS
from serving.endpoints.embeddings import EMBEDDINGS
from serving.endpoints.messages import COUNT_TOKENS, MESSAGES
from serving.endpoints.responses import RESPONSES
from serving.endpoints.tokenize import DETOKENIZE, TOKENIZE
from serving.errors import (
    GatewayError,
    Internal,
    MethodNotAllowed,
    NotFound,
    ShuttingDown,
    Unauthenticated,
)
from serving.exchange import Exchange
from serving.folding import MAX_FOLDS
from serving.journal import Journal
from serving.pipeline import Pipeline
from serving.playground import Playground
from serving.port import (
    GatewaySettings,
    Inference,
    LiveState,
    Principal,
    Receive,
    Scope,
    Send,
    Snapshot,
    SnapshotSource,
)
from serving.replicas import ReplicaPool
from serving.request import Request
from serving.snapshot import Configuration
from serving.telemetry import gauges
from serving.telemetry.metrics import GaugeRow, Metrics
from serving.telemetry.siblings import Siblings

log = logging.getLogger(__name__)

DIALECTS = {
    dialect.path: dialect
    for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, EMBEDDINGS, TOKENIZE, DETOKENIZE)
}
_SPARE_SLOTS = 64
_TEND_EVERY_S = 1.0
_CUT_TIMEOUT_S = 5.0


class Gateway:
    """One gateway in one process. Make it anywhere; `startup` and everything after belong to its event loop."""

    inference: Inference

    def __init__(
        self,
        settings: GatewaySettings,
        snapshots: SnapshotSource,
        live: LiveState,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._settings = settings
        self._coordinator = coordinator or shared.make(settings.valkey_url, settings.instance)
        self._live = live
        self._configuration = Configuration(snapshots, settings.snapshot_max_age_s)
        self._pool = ReplicaPool()
        self._metrics = Metrics(self._gauges)
        self._siblings: Siblings | None = None
        self._pipeline: Pipeline | None = None
        self._tending: asyncio.Task[None] | None = None

    @property
    def alone(self) -> bool:
        """Whether Valkey is away, so that limits are this process's share."""
        return self._coordinator.alone

    async def startup(self) -> None:
        """Open the journal and begin to serve. Call it after any fork."""
        settings = self._settings
        slots = settings.max_in_flight + MAX_FOLDS + _SPARE_SLOTS
        journal = Journal(settings.journal_root, settings.instance, slots)
        await self._coordinator.start()
        self._pipeline = Pipeline(
            settings, self._configuration, self._live, journal, self._metrics, self._pool, self._coordinator
        )
        self.inference = Playground(self._pipeline)
        if settings.siblings is not None:
            self._siblings = Siblings(settings.siblings, settings.instance, self._metrics.text)
            await self._siblings.start()
        self._tending = asyncio.create_task(self._tend())

    async def drain(self) -> None:
        """Take nothing new, let running requests finish for `drain_s`, cut the rest. Refusals are still recorded."""
        pipeline = self._pipeline
        if pipeline is None:
            return
        pipeline.stopping = True
        if not await _emptied(pipeline, self._settings.drain_s):
            for request in list(pipeline.in_flight.values()):
                request.cut(ShuttingDown())
            if not await _emptied(pipeline, _CUT_TIMEOUT_S):
                log.error(
                    "%d requests would not end; the shipper will settle them",
                    len(pipeline.in_flight),
                )

    async def shutdown(self) -> None:
        """Drain and close the journal: call it when no request can come any more."""
        pipeline = self._pipeline
        if pipeline is None:
            return
        await self.drain()
        if self._tending is not None:
            self._tending.cancel()
        await pipeline.shadows.stop()
        if self._siblings is not None:
            await self._siblings.stop()
        self._pool.close()
        await self._coordinator.stop()
        pipeline.folding.close()
        pipeline.journal.close()
        self._pipeline = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway as an application of its own, with the lifespan protocol."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self.http(scope, receive, send)

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request for /v1/*, /metrics, /healthz or /readyz."""
        exchange = Exchange(scope, receive, send)
        try:
            await self._dispatch(exchange)
        except GatewayError as error:
            await exchange.refuse(error)
        except Exception:
            log.exception("request %s: unhandled", exchange.arrival.id)
            if exchange.responding:
                raise
            await exchange.refuse(Internal())

    async def _dispatch(self, exchange: Exchange) -> None:
        path = exchange.path
        if path in DIALECTS:
            greet = DIALECTS[path].greet
            if greet is not None:
                greet(exchange)
            _allow(exchange, "POST")
            await self._generate(exchange)
        elif path == models.PATH or path.startswith(models.PATH + "/"):
            _allow(exchange, "GET")
            await self._models(exchange)
        elif path == openapi.PATH:
            _allow(exchange, "GET")
            await exchange.respond(200, openapi.document(self._settings.version))
        elif path == "/metrics":
            _allow(exchange, "GET")
            health.check_may_read_metrics(exchange, self._settings)
            text = await self._siblings.all_metrics() if self._siblings else self._metrics.text()
            await exchange.respond(200, text, [(b"content-type", health.METRICS_TYPE)])
        elif path == "/healthz":
            _allow(exchange, "GET")
            await exchange.respond_json(200, {"status": "ok"})
        elif path == "/readyz":
            _allow(exchange, "GET")
            reasons = health.unready(self._running())
            status = 503 if reasons else 200
            await exchange.respond_json(status, {"ready": not reasons, "reasons": reasons})
        else:
            raise NotFound(f"There is nothing at {path[:200]}.", code="unknown_url")

    async def _generate(self, exchange: Exchange) -> None:
        pipeline = self._running()
        principal, snapshot = self._authenticate(exchange)
        await pipeline.pause("auth")
        dialect = DIALECTS[exchange.path]
        request = Request(exchange.arrival, principal, dialect.name, snapshot)
        request.stamps.authenticated = time.monotonic_ns()
        await pipeline.serve(request, HttpCaller(exchange, dialect, self._settings))

    async def _models(self, exchange: Exchange) -> None:
        principal, snapshot = self._authenticate(exchange)
        if exchange.path == models.PATH:
            await exchange.respond_json(200, models.listing(principal, snapshot))
        else:
            name = exchange.path.removeprefix(models.PATH + "/")
            await exchange.respond_json(200, models.one(name, principal, snapshot))

    def _authenticate(self, exchange: Exchange) -> tuple[Principal, Snapshot]:
        snapshot = self._configuration.current()
        authorization = exchange.header(b"authorization") or _authorization(exchange.header(b"x-api-key"))
        try:
            return auth.authenticate(authorization, snapshot, self._settings.secret), snapshot
        except Unauthenticated as error:
            self._metrics.unauthenticated(error.reason)
            raise

    def _running(self) -> Pipeline:
        if self._pipeline is None:
            raise ShuttingDown("The gateway is not running.")
        return self._pipeline

    async def _tend(self) -> None:
        """Four times a second look at deadlines; once a second retry what the disk refused and forget what is gone."""
        pipeline = self._running()
        for turn in itertools.count(1):
            await asyncio.sleep(_TEND_EVERY_S / 4)
            try:
                pipeline.check_deadlines()
                if turn % 4 == 0:
                    pipeline.folding.end_minute(time.time())
                    pipeline.journal.retry_unwritten()
                    replicas = self._configuration.peek().replicas
                    self._pool.prune(replicas)
                    pipeline.router.prune(replicas)
            except Exception:  # one that dies quietly would leave every deadline unwatched
                log.exception("gateway: tending failed; trying again")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.startup()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.shutdown()
                await send({"type": "lifespan.shutdown.complete"})
                return

    def _gauges(self) -> Iterator[GaugeRow]:
        return gauges.rows(self._settings, self._configuration, self._pool, self._coordinator, self._pipeline)


def _allow(exchange: Exchange, method: str) -> None:
    if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
        raise MethodNotAllowed(f"Use {method} for {exchange.path[:200]}.", headers=[(b"allow", method.encode())])


async def _emptied(pipeline: Pipeline, timeout_s: float) -> bool:
    """Whether every request ended in time."""
    until = time.monotonic() + timeout_s
    while pipeline.in_flight:
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(0.02)
    return True


def _authorization(key: str | None) -> str | None:
    """Anthropic's clients send a key in a header of its own."""
    return None if key is None else f"Bearer {key}"
