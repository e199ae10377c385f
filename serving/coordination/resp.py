"""Valkey's wire format (RESP3), as far as the calls made here are answered in it."""

from __future__ import annotations

from typing import Any


class ValkeyError(Exception):
    """Valkey answered with an error. `str()` is its text, which holds no arguments."""


class Push(list[Any]):
    """A message that answers no call."""


_SIZED = {0x2A: 1, 0x7E: 1, 0x3E: 1, 0x25: 2}  # array, set, push, map: values per entry
_MORE = object()


class Reader:
    """Replies out of chunks: strings as bytes, errors as ValkeyError (returned, not raised)."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0

    def feed(self, chunk: bytes) -> None:
        self._data = self._data[self._at :] + chunk if self._at < len(self._data) else chunk
        self._at = 0

    def replies(self) -> list[Any]:
        """All that are complete."""
        found = []
        while (value := self._next()) is not _MORE:
            found.append(value)
        return found

    def _next(self) -> Any:
        start = self._at
        value = self._value()
        if value is _MORE:
            self._at = start
        return value

    def _value(self) -> Any:
        end = self._data.find(b"\r\n", self._at)
        if end < 0:
            return _MORE
        kind, head = self._data[self._at], self._data[self._at + 1 : end]
        if kind == 0x24:  # $ string
            return self._string(end + 2, int(head))
        self._at = end + 2
        if kind in _SIZED:
            return self._list(kind, int(head) * _SIZED[kind])
        if kind == 0x2B:  # + simple string
            return head
        if kind == 0x2D:  # - error
            return ValkeyError(head.decode(errors="replace"))
        if kind == 0x3A:  # : integer
            return int(head)
        if kind == 0x5F:  # _ null
            return None
        raise ValkeyError(f"Valkey sent a reply of a kind that is not known here ({chr(kind)!r}).")

    def _string(self, begin: int, length: int) -> Any:
        if length < 0:
            self._at = begin
            return None
        end = begin + length
        if len(self._data) < end + 2:
            return _MORE
        self._at = end + 2
        return self._data[begin:end]

    def _list(self, kind: int, length: int) -> Any:
        found = Push() if kind == 0x3E else []
        for _ in range(length):
            value = self._value()
            if value is _MORE:
                return _MORE
            found.append(value)
        return found
