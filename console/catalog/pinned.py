"""HTTP to a host that passed the egress check: to the addresses that were checked, no redirects, not at any pace."""

from __future__ import annotations

import http.client
import io
import json
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from console.base import egress

TIMEOUT_S = 30.0  # of one read
SLOWEST_BYTES_S = 10_000  # over PATIENCE_S of waiting
PATIENCE_S = 60.0
_JSON_BYTES = 64 << 20


class Unreachable(Exception):
    """The host gave no use; the message says what it did instead."""


class Pace:
    """How fast a host sends. Only waiting for it counts: what we do with the bytes meanwhile is not its fault."""

    def __init__(self) -> None:
        self._bytes = 0
        self._waited_s = 0.0

    def took(self, count: int, waited_s: float) -> None:
        """So many bytes came after so long. Raises Unreachable for too few in PATIENCE_S."""
        self._bytes += count
        self._waited_s += waited_s
        if self._waited_s < PATIENCE_S:
            return
        if self._bytes < SLOWEST_BYTES_S * self._waited_s:
            raise Unreachable(
                f"it was sent too slowly: {self._bytes:,} bytes in {self._waited_s:,.0f} s, and less than "
                f"{SLOWEST_BYTES_S // 1000} kB a second is given up; try again later, or name a faster host"
            )
        self._bytes, self._waited_s = 0, 0.0


class _Paced(io.RawIOBase):
    """What comes from a socket, at the pace that is asked for; a timeout alone lets a host drip for ever."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self._pace = Pace()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        before = monotonic()
        count = self._raw.readinto(buffer)
        self._pace.took(count or 0, monotonic() - before)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PacedResponse(http.client.HTTPResponse):
    """An answer whose head is paced too."""

    def __init__(self, sock: socket.socket, *rest: Any, **named: Any) -> None:
        super().__init__(sock, *rest, **named)
        self.fp: Any = io.BufferedReader(_Paced(self.fp.detach()), 1 << 16)


class _ToAddress(http.client.HTTPConnection):
    """One of the permit's addresses, whatever the host's name resolves to now."""

    response_class = _PacedResponse

    def __init__(self, permit: egress.Permit) -> None:
        super().__init__(permit.host, permit.port, timeout=TIMEOUT_S)
        self._permit = permit

    def connect(self) -> None:
        self.sock = socket.create_connection((self._permit.addresses[0], self._permit.port), TIMEOUT_S)
        if self._permit.scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self._permit.host)


def get_json(url: str, allow: egress.Allow) -> Any:
    """A JSON document. Raises Unreachable, or egress.EgressRefused."""
    with _get(url, allow) as response:
        body = response.read(_JSON_BYTES + 1)
    if len(body) > _JSON_BYTES:
        raise Unreachable(f"{url} answered with more than {_JSON_BYTES >> 20} MB")
    try:
        return json.loads(body)
    except ValueError as error:
        raise Unreachable(f"{url} answered with no JSON") from error


def download(url: str, allow: egress.Allow, target: Path, seen: Callable[[int], None]) -> None:
    """A file, whole or not at all; `seen` is told the bytes of every part. Raises as get_json does."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with _get(url, allow) as response, partial.open("wb") as file:
        expected, room = response.length, int(shutil.disk_usage(target.parent).free / 1.1)
        if expected is not None and expected > room:
            raise Unreachable(f"{url} has {expected / 1e6:,.0f} MB, and there is less room than that")
        while part := response.read(1 << 20):
            if file.tell() + len(part) > room:  # it did not say how long it is
                raise Unreachable(f"{url} goes on after {room / 1e6:,.0f} MB, and there is no more room")
            file.write(part)
            seen(len(part))
        if expected is not None and file.tell() != expected:
            raise Unreachable(f"{url} ended after {file.tell():,} of {expected:,} bytes")
    partial.replace(target)


@contextmanager
def _get(url: str, allow: egress.Allow) -> Iterator[http.client.HTTPResponse]:
    try:
        permit = egress.check(url, allow, egress.resolve_by_system)
        connection = _ToAddress(permit)
        try:
            connection.request("GET", urlsplit(url).path or "/", headers={"accept-encoding": "identity"})
            response = connection.getresponse()
            if 300 <= response.status < 400:
                raise Unreachable(f"{permit.host} sends elsewhere, which is not followed: name one that answers itself")
            if response.status != 200:
                raise Unreachable(f"{permit.host} answered with status {response.status}")
            yield response
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, egress.Unresolved) as error:
        raise Unreachable(f"{urlsplit(url).hostname} could not be reached: {error}") from error
