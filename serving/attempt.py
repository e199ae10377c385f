"""One dispatch of a request to one replica."""

from __future__ import annotations

import time

from serving import dispatch
from serving.answer import Answer
from serving.dialect import Dialect, Reply
from serving.errors import NotFound, TransportFault, UpstreamFailed
from serving.journal import SlotTable
from serving.port import Replica
from serving.relay import Relay
from serving.replicas import Channel, ReplicaPool
from serving.request import Request
from serving.upstream import EngineCall

_NO_ENDPOINT = frozenset((404, 405, 501))


class Attempt:
    """Leaves its channel on every way out; `abort` tells the engine to stop."""

    def __init__(self, request: Request, replica: Replica, dialect: Dialect, pool: ReplicaPool) -> None:
        self.replica = replica
        self._request = request
        self._dialect = dialect
        self._pool = pool
        self._channel: Channel = pool.channel(replica)
        self._call: EngineCall | None = None

    async def stream(self, answer: Answer, slots: SlotTable, secret: bytes, *, leads: bool = True) -> Relay:
        """Relay the engine's stream to `answer`, to its end. Raises what went wrong, or Superseded.

        What it counts counts for the request from the start if it `leads`, else from its first text on.
        """
        relay = Relay(self._request, self._dialect, answer, slots, self.replica.engine)
        if leads:
            self._request.adopt(relay)
        await self._exchange(relay, secret)
        if not relay.finished:
            raise TransportFault("The engine's stream ended before its answer did.")
        return relay

    async def whole(self, slots: SlotTable, secret: bytes) -> Reply:
        """Get the answer in one piece, noted in `slots` before the client gets it. Raises what went wrong."""
        assert self._dialect.whole is not None
        try:
            body = await self._exchange(None, secret)
        except UpstreamFailed as error:
            if error.answered in _NO_ENDPOINT and not self._dialect.generates:
                raise NotFound("The engine of this model has no such endpoint.", code="unsupported_endpoint") from error
            raise
        assert body is not None
        if self._request.capture is not None and self._dialect.generates:
            self._request.capture.take_whole(body)
        try:
            reply = self._dialect.whole(body, self._request)
        except ValueError as error:  # msgspec's are ValueErrors
            raise UpstreamFailed("The engine's answer cannot be read.") from error
        self._request.stamps.first_chunk = self._request.stamps.last_chunk = time.monotonic_ns()
        self._request.counts.relayed = reply.heard
        if reply.usage is not None:
            self._request.counts.take(reply.usage, reply.usage.completion_tokens or 0)
        self._note(slots)
        return reply

    def _note(self, slots: SlotTable) -> None:
        """Note what the answer comes to where it outlives this process: a kill from here on still bills it."""
        request, counts = self._request, self._request.counts
        if request.slot is not None:
            slots.update(request.slot, request.arrival.uuid, counts.prompt, counts.cached, counts.generated)

    def abort(self) -> None:
        """Close the connection, which is how an engine learns to stop."""
        if self._call is not None:
            self._call.abort()

    async def _exchange(self, relay: Relay | None, secret: bytes) -> bytes | None:
        request, channel = self._request, self._channel
        channel.in_flight += 1
        try:
            connection = await channel.connection()
            path = self._dialect.upstream or self._dialect.path
            head = channel.head(path)
            message = dispatch.outgoing(request, self.replica, secret, head, stream=relay is not None)
            call = self._call = EngineCall(connection, relay.take if relay is not None else None, channel.loop)
            request.attempts += 1
            request.stamps.posted = time.monotonic_ns()
            call.send(message)
            body = await call.done
            if relay is not None:
                if relay.stopped_early:
                    call.abort()
                else:
                    channel.leave_to_end(connection, call)
            return body
        except BaseException:
            self.abort()
            raise
        finally:
            request.stamps.ended = time.monotonic_ns()
            self._pool.leave(channel)
