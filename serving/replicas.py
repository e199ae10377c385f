"""Pooled connections to replicas, and how many requests this gateway has on each."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from urllib.parse import urlsplit

from serving.connection import Connection, Reader
from serving.errors import TransportFault
from serving.port import Replica

CONNECT_TIMEOUT_S = 5.0
# Under the 5 s after which uvicorn, vLLM's server, drops an idle connection: reusing one just then costs a retry.
IDLE_S = 4.0
DRAIN_S = 1.0  # a response whose reader has left may still end by itself for so long


class Channel:
    """The connections to one launch of one replica. A restart is a new epoch and gets a new Channel."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.in_flight = 0
        self.retired = False
        self.loop = asyncio.get_running_loop()
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._draining: dict[Connection, float] = {}
        self._heads: dict[str, bytes] = {}
        parts = urlsplit(replica.url or "http://engine")
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._authority = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None

    async def connection(self) -> Connection:
        """An idle connection, or a new one; raises TransportFault when the replica does not take it."""
        oldest = time.monotonic() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if not connection.closing and connection.idle_since >= oldest:
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await self._connect()
        except (OSError, TimeoutError) as error:
            raise TransportFault("The engine could not be reached.") from error

    def head(self, path: str) -> bytes:
        """The request line and the headers that are the same every time. Nothing of a caller's headers passes."""
        head = self._heads.get(path)
        if head is None:
            lines = [f"POST {self._prefix}{path} HTTP/1.1", f"Host: {self._authority}"]
            lines.append("Content-Type: application/json")
            if self.replica.api_key:
                lines.append(f"Authorization: Bearer {self.replica.api_key}")
            head = self._heads[path] = ("\r\n".join(lines) + "\r\n").encode("latin-1")
        return head

    @property
    def connections(self) -> int:
        """Open connections, in use and idle."""
        return len(self._open)

    def oldest_s(self) -> float:
        """Age of the oldest open connection."""
        born = min((connection.opened_at for connection in self._open), default=None)
        return 0.0 if born is None else time.monotonic() - born

    def leave_to_end(self, connection: Connection, reader: Reader) -> None:
        """The reader has its answer: what follows is read away and the connection comes back by itself or is closed."""
        if not connection.serves(reader):
            return  # it has come back, and another request may have it
        connection.forget_reader()
        if not connection.closing:
            self._draining[connection] = time.monotonic()

    def tend(self) -> None:
        """Close what has idled too long or would not end."""
        now = time.monotonic()
        while self._idle and self._idle[0].idle_since < now - IDLE_S:
            self._idle.popleft().abort()
        for connection, since in list(self._draining.items()):
            if since < now - DRAIN_S:
                connection.abort()

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()

    async def _connect(self) -> Connection:
        loop = self.loop
        if self.replica.uds:
            _, connection = await loop.create_unix_connection(self._new, self.replica.uds)
        else:
            host = self.replica.addresses[0] if self.replica.addresses else self._host
            name = self._host if self._tls else None
            _, connection = await loop.create_connection(
                self._new, host, self._port, ssl=self._tls, server_hostname=name
            )
        self._open.add(connection)
        return connection

    def _new(self) -> Connection:
        return Connection(self._released, self._dropped)

    def _released(self, connection: Connection) -> None:
        self._draining.pop(connection, None)
        if self.retired:
            connection.abort()
        else:
            self._idle.append(connection)

    def _dropped(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._draining.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)


class ReplicaPool:
    """The Channels of every replica that was ever chosen and still exists."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = {}
        self._retired: list[Channel] = []

    def in_flight(self, replica_id: str) -> int:
        channel = self._channels.get(replica_id)
        return 0 if channel is None else channel.in_flight

    def channels(self) -> list[Channel]:
        return list(self._channels.values())

    def channel(self, replica: Replica) -> Channel:
        """The Channel of this launch of the replica; connections to an earlier one are dropped."""
        channel = self._channels.get(replica.id)
        if channel is not None and (channel.replica is replica or _same_launch(channel.replica, replica)):
            return channel
        if channel is not None:
            self._retire(channel)
        channel = self._channels[replica.id] = Channel(replica)
        return channel

    def leave(self, channel: Channel) -> None:
        """A request has left this channel."""
        channel.in_flight -= 1
        if channel.retired and channel.in_flight == 0:
            self._retired.remove(channel)
            channel.close()

    def prune(self, replicas: Mapping[str, Replica]) -> None:
        """Drop the channels of replicas that are gone or were started anew, and connections that idled too long."""
        for replica_id, channel in list(self._channels.items()):
            replica = replicas.get(replica_id)
            if replica is None or not _same_launch(channel.replica, replica):
                del self._channels[replica_id]
                self._retire(channel)
            else:
                channel.tend()

    def close(self) -> None:
        for channel in [*self._channels.values(), *self._retired]:
            channel.close()
        self._channels.clear()
        self._retired.clear()

    def _retire(self, channel: Channel) -> None:
        channel.retired = True
        if channel.in_flight:
            self._retired.append(channel)
        else:
            channel.close()


def _same_launch(one: Replica, other: Replica) -> bool:
    """Whether connections to the one lead to the other too; a new key or address needs new ones."""
    return (one.epoch, one.uds, one.url, one.api_key, one.addresses) == (
        other.epoch,
        other.uds,
        other.url,
        other.api_key,
        other.addresses,
    )
