"""May this request run now? Everything that is asked before a replica is chosen.

Limits per key and tenant are not here yet: they will be one more check at the end of `Admission.admit`, with its
reservation kept on the Request and corrected when it settles.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from serving import auth
from serving.errors import BadRequest, NotFound, Unavailable
from serving.port import GatewaySettings, Principal, Route, Snapshot
from serving.schemas import Ask

_DISK_CHECK_S = 1.0
# Text is told too long only when it is so by far: the exact count is the tokenizer's, in the engine.
_SURELY = 4


class Admission:
    """The checks that look at the gateway itself: disk and requests in flight."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._root: Path = settings.journal_root
        self._min_free = settings.min_free_disk_bytes
        self._max_in_flight = settings.max_in_flight
        self._checked_at = -_DISK_CHECK_S
        self._free_bytes = 0

    def check_capacity(self, in_flight: int) -> None:
        """Refuse work that could not be metered or would not fit."""
        if in_flight > self._max_in_flight:
            raise Unavailable(
                "The gateway has too many requests in flight.",
                code="too_many_in_flight",
                retry_after=2,
            )
        self.check_disk()

    def check_disk(self) -> None:
        """New work is refused before metering is."""
        if self.free_bytes() < self._min_free:
            raise Unavailable(
                "The gateway is low on disk space and cannot take new requests.",
                code="low_disk",
                retry_after=30,
            )

    def free_bytes(self) -> int:
        """Free bytes where the journal lives, looked up once a second."""
        now = time.monotonic()
        if now - self._checked_at >= _DISK_CHECK_S:
            stat = os.statvfs(self._root)
            self._free_bytes = stat.f_bavail * stat.f_frsize
            self._checked_at = now
        return self._free_bytes


def admit(ask: Ask, principal: Principal, snapshot: Snapshot) -> Route:
    """Find the route and check the request against its bounds; applies the route's default_max_tokens."""
    route = snapshot.routes.get(ask.model)
    if route is None or not auth.may_use(principal, route):
        raise model_not_found(ask.model)
    _check_length(ask, route)
    if ask.max_tokens is None and route.default_max_tokens is not None:
        ask.max_tokens = route.default_max_tokens
        ask.upstream["max_tokens"] = ask.params["max_tokens"] = ask.max_tokens
    return route


def model_not_found(name: str) -> NotFound:
    """The same answer for a model that is not there and one the key may not use: names are not probed."""
    return NotFound(
        f"The model `{name[:128]}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def _check_length(ask: Ask, route: Route) -> None:
    longest = route.max_prompt_tokens or (route.max_model_len - 1 if route.max_model_len else 0)
    if longest and ask.prompt_estimate > (longest if _is_exact(ask) else longest * _SURELY):
        raise BadRequest(
            f"This model takes prompts of at most {longest} tokens; yours has about {ask.prompt_estimate}.",
            param=next(name for name in ("messages", "prompt", "input") if name in ask.upstream),
            code="context_length_exceeded",
        )
    if route.max_model_len and ask.max_tokens is not None and ask.max_tokens > route.max_model_len:
        raise BadRequest(
            f"max_tokens is {ask.max_tokens}, but this model's context holds {route.max_model_len} tokens.",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _is_exact(ask: Ask) -> bool:
    """A prompt of token ids is already counted."""
    prompt = ask.upstream.get("prompt")
    return isinstance(prompt, list) and isinstance(prompt[0], int)
