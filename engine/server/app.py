"""Which path does what, who may call it, and what an error looks like."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from engine import __version__
from engine.blockmap import block_map
from engine.errors import RequestError, Unauthorized, UnknownModel
from engine.server.answers import answer
from engine.server.embedding import embed
from engine.server.http import Disconnected, Exchange, Receive, Scope, Send
from engine.server.schema import integer, read_fields
from engine.server.service import Service
from engine.server.tokenizing import detokenize, tokenize

Endpoint = Callable[[Exchange], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_GUARDED = ("/v1/", "/tokenize", "/detokenize", "/pool")  # paths that need the key, if there is one
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineApp:
    """The ASGI application; `inference=False` leaves the introspection endpoints only."""

    def __init__(self, service: Service, *, inference: bool = True) -> None:
        self._service = service
        self._routes: dict[tuple[str, str], Endpoint] = {
            ("GET", "/health"): self._health,
            ("GET", "/stats"): self._stats,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): self._version,
            ("GET", "/debug/steps"): self._steps,
            ("GET", "/debug/blocks"): self._blocks,
        }
        if inference:
            self._routes |= {
                ("GET", "/v1/models"): self._models,
                ("POST", "/v1/chat/completions"): self._chat,
                ("POST", "/v1/completions"): self._completions,
                ("POST", "/v1/embeddings"): self._embeddings,
                ("POST", "/tokenize"): self._tokenize,
                ("POST", "/detokenize"): self._detokenize,
                ("PUT", "/pool"): self._pool,
            }
        self._inference = inference

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._endpoint(exchange)(exchange)
        except RequestError as error:
            await exchange.fail(error)
        except Disconnected:
            return

    def _endpoint(self, exchange: Exchange) -> Endpoint:
        """Find the endpoint. Raises RequestError (404, 405) or Unauthorized."""
        path = exchange.path
        if path.startswith(_GUARDED) and self._inference:
            self._authorise(exchange)
        found = self._routes.get((exchange.method, path))
        if found is not None:
            return found
        if self._inference and exchange.method == "GET" and path.startswith("/v1/models/"):
            return self._model
        known = any(known == path for _, known in self._routes)
        error = RequestError(f"{exchange.method} {path} does not exist here.", code="not_found")
        error.status = 405 if known else 404
        raise error

    def _authorise(self, exchange: Exchange) -> None:
        key = self._service.api_key
        if key is None:
            return
        given = exchange.header("authorization")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise Unauthorized("A valid API key is needed: Authorization: Bearer …")

    async def _chat(self, exchange: Exchange) -> None:
        await self._answer(exchange, chat=True)

    async def _completions(self, exchange: Exchange) -> None:
        await self._answer(exchange, chat=False)

    async def _answer(self, exchange: Exchange, *, chat: bool) -> None:
        if self._service.headless:
            raise RequestError("This model has no head that could write text: it makes embeddings.", "model")
        await answer(self._service, exchange, chat=chat)

    async def _embeddings(self, exchange: Exchange) -> None:
        await embed(self._service, exchange)

    async def _tokenize(self, exchange: Exchange) -> None:
        await tokenize(self._service, exchange)

    async def _detokenize(self, exchange: Exchange) -> None:
        await detokenize(self._service, exchange)

    async def _pool(self, exchange: Exchange) -> None:
        fields = read_fields(await exchange.body(), {"usable_blocks": integer(1)}, ("usable_blocks",))
        await exchange.json(self._service.limit_pool(fields["usable_blocks"]))

    async def _models(self, exchange: Exchange) -> None:
        await exchange.json({"object": "list", "data": [self._describe()]})

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        if name != self._service.config.name:
            raise UnknownModel(f"The model '{name}' does not exist.", "model")
        await exchange.json(self._describe())

    async def _health(self, exchange: Exchange) -> None:
        reason = self._service.core.unhealthy()
        if reason is None:
            await exchange.json({"status": "ok"})
        else:
            await exchange.json({"status": "unhealthy", "reason": reason}, 503)

    async def _stats(self, exchange: Exchange) -> None:
        await exchange.json(self._service.stats())

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.reply(200, self._service.metrics.render(), METRICS_TYPE)

    async def _steps(self, exchange: Exchange) -> None:
        asked = exchange.query.get("last", "100")
        if not asked.isascii() or not asked.isdigit() or len(asked) > 9:
            raise RequestError("'last' must be a number of steps.", "last")
        await exchange.json(self._service.last_steps(int(asked)))

    async def _blocks(self, exchange: Exchange) -> None:
        await exchange.json(block_map(self._service.core.scheduler))

    async def _version(self, exchange: Exchange) -> None:
        await exchange.json({"version": __version__})

    def _describe(self) -> dict[str, Any]:
        return {
            "id": self._service.config.name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "fanlight",
            "max_model_len": self._service.max_model_len,
        }
