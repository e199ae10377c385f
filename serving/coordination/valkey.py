"""One connection to Valkey: calls made in one tick of the loop leave in one write, answers come back in order.

RESP3, so that messages of the subscribed channel arrive on the same connection, in order with the answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import msgspec

from serving.coordination.library import Library, command
from serving.coordination.resp import Push, Reader, ValkeyError

log = logging.getLogger(__name__)

CONNECT_S = 1.0
SILENCE_S = 0.25  # without the answer to a call, Valkey counts as away
MAX_UNWRITTEN = 16_000_000  # bytes that wait for the socket

_decode = msgspec.msgpack.Decoder().decode
Answer = Callable[[list[Any] | None], None]  # gets the decoded answer, or None: Valkey went away before it came


class Away(Exception):
    """Valkey cannot be reached; the message says why and holds no password."""


class Address:
    """Where Valkey is: redis://[user:password@]host[:port][/db] or unix://[user:password@]/path[?db=n]."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "unix"):
            raise ValueError("The URL of Valkey must begin with unix:// or redis://.")
        self.path = unquote(parts.path) if parts.scheme == "unix" else ""
        self.host, self.port = parts.hostname or "localhost", parts.port or 6379
        self.user, self.password = unquote(parts.username or "default"), unquote(parts.password or "")
        query = dict(item.partition("=")[::2] for item in parts.query.split("&"))
        database = query.get("db") or ("" if self.path else parts.path.strip("/"))
        if not database.isdigit() and database:
            raise ValueError("The database in the URL of Valkey must be a number.")
        self.database = database or "0"

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    def greeting(self, channel: str) -> list[bytes]:
        """What is said first. Only the last, SUBSCRIBE, has no answer but a message."""
        auth = ("AUTH", self.user, self.password) if self.password else ()
        return [command("HELLO", "3", *auth), command("SELECT", self.database), command("SUBSCRIBE", channel)]


class Link(asyncio.Protocol):
    """An open connection. Once lost it stays so: every pending call is answered with None, then `on_lost` is called."""

    def __init__(self, library: Library, on_message: Callable[[list[Any]], None], on_lost: Callable[[], None]) -> None:
        self._library = library
        self._on_message = on_message
        self._on_lost = on_lost
        self.loop = asyncio.get_running_loop()
        self._reader = Reader()
        self._pending: deque[tuple[float, Callable[[Any], None]]] = deque()
        self._unwritten: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.lost = False

    # -- calls

    def call(self, function: str, args: Any, answer: Answer, *, first: bool = False) -> None:
        """Call a function of the library. `answer` runs when the answer is read, before anything read after it.

        first: before all that was called in this tick of the loop.
        """
        self.send(self._library.call(function, args), lambda reply: answer(self._unpack(reply)), first=first)

    def send(self, payload: bytes, answer: Callable[[Any], None], *, first: bool = False) -> None:
        if self.lost:
            answer(None)
            return
        if not self._unwritten:
            self.loop.call_soon(self._write)
        now = self.loop.time()
        self._pending.insert(len(self._pending) - len(self._unwritten) if first else len(self._pending), (now, answer))
        self._unwritten.insert(0 if first else len(self._unwritten), payload)
        if self._watch is None:
            self._watch = self.loop.call_at(now + SILENCE_S, self._check, now + SILENCE_S)

    def _unpack(self, reply: Any) -> list[Any] | None:
        if isinstance(reply, bytes):
            return cast("list[Any]", _decode(reply))
        if isinstance(reply, ValkeyError):
            self.close(f"it answered {reply}")
        return None

    def _write(self) -> None:
        payload, self._unwritten = b"".join(self._unwritten), []
        self.write(payload)

    def write(self, payload: bytes) -> None:
        """Write at once what has no answer, or whose answers are pending."""
        if self._transport is None or self.lost:
            return
        self._transport.write(payload)
        if self._transport.get_write_buffer_size() > MAX_UNWRITTEN:
            self.close("it does not read")

    def _check(self, due: float) -> None:
        """Look after the oldest call. A loop that was busy itself gets a moment to read first."""
        self._watch = None
        if not self._pending:
            return
        now, oldest = self.loop.time(), self._pending[0][0] + SILENCE_S
        if oldest > now or now - due > 0.02:
            again = max(oldest, now + 0.01)
            self._watch = self.loop.call_at(again, self._check, again)
        else:
            self.close(f"no answer within {SILENCE_S:.2f} s")

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            replies = self._reader.replies()
        except ValueError as error:
            self.close(f"it does not speak RESP3 ({error})")
            return
        except ValkeyError as error:
            self.close(str(error))
            return
        for reply in replies:
            if self.lost:
                return
            if isinstance(reply, Push):
                if reply[0] == b"message":
                    self._on_message(_decode(reply[2]))
            else:
                self._pending.popleft()[1](reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.close("it closed the connection")

    def close(self, reason: str = "") -> None:
        """End the connection; `reason` is logged where there is one."""
        if self.lost:
            return
        self.lost = True
        if reason:
            log.warning("Valkey is away: %s.", reason)
        if self._watch:
            self._watch.cancel()
        if self._transport:
            self._transport.abort()
        self._on_lost()
        while self._pending:
            self._pending.popleft()[1](None)


async def connect(
    address: Address,
    library: Library,
    channel: str,
    on_message: Callable[[list[Any]], None],
    on_lost: Callable[[], None],
) -> Link:
    """A connection that is signed in, subscribed and has the library loaded. Raises Away."""
    loop = asyncio.get_running_loop()
    link = Link(library, on_message, on_lost)
    try:
        async with asyncio.timeout(CONNECT_S):
            if address.path:
                await loop.create_unix_connection(lambda: link, address.path)
            else:
                await loop.create_connection(lambda: link, address.host, address.port)
            hello, select, subscribe = address.greeting(channel)
            for payload in (hello, select, library.load()):
                await _done(link, payload)
            link.write(subscribe)
    except (OSError, TimeoutError, ValkeyError) as error:
        link.close()
        raise Away(f"Valkey at {address} cannot be used: {error or type(error).__name__}") from error
    except BaseException:
        link.close()
        raise
    return link


async def _done(link: Link, payload: bytes) -> None:
    """Wait for a command to succeed."""
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(reply: Any) -> None:
        if not answered.done():
            answered.set_result(reply)

    link.send(payload, answer)
    reply = await answered
    if isinstance(reply, ValkeyError):
        raise reply
    if reply is None:
        raise ConnectionError("the connection was lost")
