"""What may cut an admitted request short: its client leaving, and the deadlines of its route."""

from __future__ import annotations

import asyncio
import time

from serving.caller import Caller
from serving.errors import ClientLeft, DeadlineExceeded
from serving.request import Request


class Watch:
    """Begins when the request is admitted. The deadlines end with the engine's part, the rest with the request."""

    def __init__(self, request: Request, caller: Caller) -> None:
        assert request.route is not None and request.ask is not None
        self._request = request
        self._route = request.route
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._departure = self._loop.create_task(self._wait_for_departure())
        patience = self._route.first_token_deadline_s
        self._progress = self._loop.call_later(patience, self._check_progress)
        self._deadline: asyncio.TimerHandle | None = None
        if not request.ask.stream:
            spent = (time.monotonic_ns() - request.arrival.received) / 1e9
            self._deadline = self._loop.call_later(self._route.deadline_s - spent, self._too_late)

    def engine_ended(self) -> None:
        """The answer is complete: only the client can still spoil it."""
        self._progress.cancel()
        if self._deadline is not None:
            self._deadline.cancel()

    def end(self) -> None:
        self.engine_ended()
        self._departure.cancel()

    async def _wait_for_departure(self) -> None:
        await self._caller.gone()
        self._request.cut(ClientLeft())

    def _check_progress(self) -> None:
        """One timer for the first token and each stall after it; re-armed, not reset: a chunk costs nothing."""
        stamps, patience = self._request.stamps, self._route.first_token_deadline_s
        since = stamps.last_chunk if stamps.first_chunk else stamps.admitted
        left = patience - (time.monotonic_ns() - since) / 1e9
        if left > 0:
            self._progress = self._loop.call_later(left, self._check_progress)
            return
        what = "next" if stamps.first_chunk else "first"
        self._request.cut(DeadlineExceeded(f"The model sent no {what} token within {patience:g} seconds."))

    def _too_late(self) -> None:
        self._request.cut(
            DeadlineExceeded(
                f"The answer took longer than the {self._route.deadline_s:g} seconds that this route allows without"
                " streaming; send stream: true for long answers."
            )
        )
