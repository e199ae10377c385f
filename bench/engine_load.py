"""A load generator that leaves the cores to the server: one thread, raw sockets, nothing parsed while tokens arrive.

It stamps every read that brought text and looks for the token counts only in what the server said last. With the
clients on the same two cores as the servers, a usual HTTP client would cost more than a fast engine's step.
"""

from __future__ import annotations

import json
import random
import re
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

# Every word is one token with a space before it in SmolLM2's vocabulary, so a prompt's length is known, and checked.
WORDS = (
    "river stone lamp paper cloud engine garden window mirror bridge silver winter table music water green house light "
    "road school story letter animal morning family market doctor summer forest island kitchen picture question answer "
    "number history science country village mountain ocean machine metal glass color voice dream power energy nature "
    "money travel season student teacher friend party street church building library hospital station"
).split()
_TEXT = re.compile(rb'"text": ?"[^"]')
_COUNTS = {
    "prompt_tokens": re.compile(rb'"prompt_tokens": ?(\d+)'),
    "completion_tokens": re.compile(rb'"completion_tokens": ?(\d+)'),
    "cached_tokens": re.compile(rb'"cached_tokens": ?(\d+)'),
}


class LoadError(Exception):
    """A server answered with something else than a whole stream, or too late."""


@dataclass
class Reply:
    """What one client saw, in seconds of its own monotonic clock."""

    asked: int  # tokens
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of every read that brought text
    counts: dict[str, int] = field(default_factory=dict)
    buffer: bytearray = field(default_factory=bytearray)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def feed(self, data: bytes) -> bool:
        """Take what arrived. True once the stream is over."""
        now = time.perf_counter()
        self.buffer += data
        # The first token may come in a read of its own or together with the headers; only then is the whole searched.
        if _TEXT.search(self.buffer if not self.arrivals else data):
            self.arrivals.append(now)
        if data and b"[DONE]" not in self.buffer[-64:]:
            return False
        self.ended = now
        self._read_counts()
        return True

    def _read_counts(self) -> None:
        said = bytes(self.buffer)
        if b" 200 " not in said[:20] or b"[DONE]" not in said[-64:] or not self.arrivals:
            raise LoadError(f"not a whole stream: {said[:300]!r} … {said[-200:]!r}")
        for name, pattern in _COUNTS.items():
            found = pattern.findall(said)
            self.counts[name] = int(found[-1]) if found else 0
        if self.counts["completion_tokens"] != self.asked:
            raise LoadError(f"asked for {self.asked} tokens, got {self.counts}")


@dataclass(frozen=True)
class Ask:
    """One request: a prompt of text and how many tokens it shall get, whatever the model would say."""

    prompt: str
    tokens: int

    def encode(self, port: int) -> bytes:
        body = {
            "model": "bench",
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + payload


def words(seed: object, count: int) -> str:
    """A text of `count` tokens, another one for every seed."""
    return " ".join(["The", *random.Random(repr(seed)).choices(WORDS, k=count - 1)])


def drive(port: int, asks: Iterable[Ask], at_once: int, timeout_s: float = 300) -> list[Reply]:
    """Send all of them, at most `at_once` at a time, the next as soon as one ends. Replies in the order of sending."""
    waiting = [(ask, ask.encode(port)) for ask in reversed(list(asks))]
    replies: list[Reply] = []
    deadline = time.perf_counter() + timeout_s
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or selector.get_map():
                while waiting and len(selector.get_map()) < at_once:
                    replies.append(_send(selector, port, *waiting.pop()))
                _receive(selector, deadline)
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
    return replies


def _send(selector: selectors.BaseSelector, port: int, ask: Ask, request: bytes) -> Reply:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    reply = Reply(ask.tokens, sent=time.perf_counter())
    connection.sendall(request)
    connection.setblocking(False)
    selector.register(connection, selectors.EVENT_READ, reply)
    return reply


def _receive(selector: selectors.BaseSelector, deadline: float) -> None:
    left = deadline - time.perf_counter()
    if left <= 0:
        raise LoadError("the server did not answer in time")
    for key, _ in selector.select(left):
        connection = key.fileobj
        assert isinstance(connection, socket.socket)
        if key.data.feed(connection.recv(1 << 18)):
            selector.unregister(connection)
            connection.close()
