"""Pooled connections to replicas, and how many requests this gateway has on each."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from yarl import URL

from serving.port import Replica

CONNECT_TIMEOUT_S = 5.0
# Under the 5 s after which uvicorn, vLLM's server, drops an idle connection: reusing one just then costs a retry.
IDLE_S = 4.0
_READ_BUFFER = 256 * 1024


class Channel:
    """The connections to one launch of one replica. A restart is a new epoch and gets a new Channel."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.in_flight = 0
        self.retired = False
        self._connector = _connector(replica)
        self._base = URL((replica.url or "http://engine").rstrip("/"))
        self._urls: dict[str, URL] = {}
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            read_bufsize=_READ_BUFFER,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Send a request and wait for the head of its response."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = self._base.joinpath(path.lstrip("/"))
        return await self._session.post(url, data=body, headers=headers, allow_redirects=False)

    @property
    def connections(self) -> int:
        """Open connections, in use and idle."""
        idle = sum(len(pool) for pool in self._connector._conns.values())
        return idle + len(self._connector._acquired)

    def retire(self) -> None:
        """Take no more requests; closes as soon as the last one running has left."""
        self.retired = True

    async def close(self) -> None:
        await self._session.close()


def _connector(replica: Replica) -> aiohttp.BaseConnector:
    if replica.uds:
        return aiohttp.UnixConnector(path=replica.uds, limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, force_close=False)


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

    async def channel(self, replica: Replica) -> Channel:
        """The Channel of this launch of the replica; connections to an earlier one are dropped."""
        channel = self._channels.get(replica.id)
        if channel is not None and _same_launch(channel.replica, replica):
            return channel
        if channel is not None:
            await self._retire(channel)
        channel = self._channels[replica.id] = Channel(replica)
        return channel

    async def leave(self, channel: Channel) -> None:
        """A request has left this channel."""
        channel.in_flight -= 1
        if channel.retired and channel.in_flight == 0:
            self._retired.remove(channel)
            await channel.close()

    async def prune(self, replicas: Mapping[str, Replica]) -> None:
        """Drop the channels of replicas that are gone or were started anew."""
        for replica_id, channel in list(self._channels.items()):
            replica = replicas.get(replica_id)
            if replica is None or not _same_launch(channel.replica, replica):
                del self._channels[replica_id]
                await self._retire(channel)

    async def close(self) -> None:
        for channel in [*self._channels.values(), *self._retired]:
            await channel.close()
        self._channels.clear()
        self._retired.clear()

    async def _retire(self, channel: Channel) -> None:
        channel.retire()
        if channel.in_flight:
            self._retired.append(channel)
        else:
            await channel.close()


def _same_launch(one: Replica, other: Replica) -> bool:
    return (one.epoch, one.uds, one.url) == (other.epoch, other.uds, other.url)
