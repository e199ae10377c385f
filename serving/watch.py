"""What may cut an admitted request short: its client leaving, and the deadlines of its route."""

from __future__ import annotations

from serving.caller import Caller
from serving.eager import Driven
from serving.errors import ClientLeft, DeadlineExceeded, GatewayError
from serving.request import Request

_S = 1_000_000_000


class Watch:
    """Begins when the request is admitted. The deadlines end with the engine's part, the rest with the request."""

    def __init__(self, request: Request, caller: Caller) -> None:
        assert request.route is not None and request.ask is not None
        self._request = request
        self._route = request.route
        self._over = False
        self.expects_tokens = True  # False: the answer comes in one piece, and only the whole of it has a deadline
        self._departure = Driven(caller.gone(), self._departed)
        self._departure.start()

    def engine_ended(self) -> None:
        """The answer is complete: only the client can still spoil it."""
        self._over = True

    def end(self) -> None:
        self._over = True
        self._departure.close()

    def check(self, now: int) -> None:
        """Cut the request if it is over one of its deadlines; `now` in monotonic nanoseconds."""
        if not self._over:
            error = self._stalled(now) or self._too_late(now)
            if error is not None:
                self._request.cut(error)

    def _departed(self, _nothing: None, _error: BaseException | None) -> None:
        self._request.cut(ClientLeft())

    def _stalled(self, now: int) -> GatewayError | None:
        """Each attempt has the time to its first token anew; the queue has a bound of its own."""
        stamps = self._request.stamps
        if not stamps.posted or not self.expects_tokens:
            return None
        if stamps.first_chunk:
            which, since, patience = "next", stamps.last_chunk, self._route.inter_token_deadline_s
        else:
            which, since, patience = "first", stamps.routed, self._route.first_token_deadline_s
        if now - since < patience * _S:
            return None
        return DeadlineExceeded(f"The model sent no {which} token within {patience:g} seconds.")

    def _too_late(self, now: int) -> GatewayError | None:
        ask, allowed = self._request.ask, self._route.deadline_s
        assert ask is not None
        if ask.stream or now - self._request.arrival.received < allowed * _S:
            return None
        return DeadlineExceeded(
            f"The answer took longer than the {allowed:g} seconds that this route allows without"
            " streaming; send stream: true for long answers."
        )
