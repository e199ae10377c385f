"""The function library in Valkey: its source, its name, and how a call of it is written.

Every decision that gateways share is one call of one function, so that it is atomic. The name carries a hash of the
source: two versions of the gateway can run on one Valkey while one replaces the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

PARTS = ("windows", "budgets", "queue", "requests", "admit", "settle", "processes", "reading", "wake", "register")
_FOLDER = Path(__file__).parent
_encode = msgspec.msgpack.Encoder().encode


class Library:
    """The library as text, and its calls as RESP. change: made to the source; tests put their own clock there."""

    def __init__(self, change: Callable[[str], str] = str) -> None:
        source = change("\n".join((_FOLDER / f"{part}.lua").read_text() for part in PARTS))
        self.name = "fanlight_v1_" + hashlib.sha256(source.encode()).hexdigest()[:12]
        self.source = f"#!lua name={self.name}\n" + source.replace("LIBRARY_", self.name + "_")

    def load(self) -> bytes:
        return command("FUNCTION", "LOAD", "REPLACE", self.source)

    def call(self, function: str, args: Any) -> bytes:
        """FCALL of a function with its arguments, a list, packed."""
        packed = _encode(args)
        name = f"{self.name}_{function}".encode()
        return b"*4\r\n$5\r\nFCALL\r\n$%d\r\n%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(name), name, len(packed), packed)


def command(*words: str) -> bytes:
    """A command in RESP."""
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
