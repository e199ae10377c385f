"""Asks workers how they are: /health and /stats over loopback, and one real generation over their socket."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PROBE_TIMEOUT_S = 2.0
VERIFY_TIMEOUT_S = 120.0


class VerificationError(Exception):
    """A worker did not answer the test prompt; the message says what it did instead."""


class NoAnswer(Exception):
    """A worker did not answer a probe in time, or not with sense."""


@dataclass(frozen=True)
class Answer:
    """What a worker says of itself: whether it makes progress, why not, and its /stats with `at` (wall seconds)."""

    healthy: bool
    reason: str
    stats: dict[str, Any]


def ask(introspection_url: str) -> Answer:
    """Ask /health and /stats once. Raises NoAnswer."""
    parts = urlsplit(introspection_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
        healthy = response.status == 200
        connection.request("GET", "/stats")
        stats = json.loads(connection.getresponse().read())
        if not isinstance(stats, dict):
            raise ValueError("/stats is no object")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(str(error)) from error
    finally:
        connection.close()
    return Answer(healthy, "" if healthy else _message(body), {**stats, "at": time.time()})


def verify(uds: str, served_name: str) -> float:
    """Have the worker generate two tokens. Returns the seconds it took; raises VerificationError."""
    body = json.dumps(
        {
            "model": served_name,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 2,
            "temperature": 0,
        }
    )
    started = time.monotonic()
    connection = _UnixConnection(uds, VERIFY_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        if response.status != 200:
            raise VerificationError(f"The test prompt got status {response.status}: {_message(text)}")
        if json.loads(text)["usage"]["completion_tokens"] < 1:
            raise VerificationError("The test prompt got no token")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise VerificationError(f"The test prompt got no answer: {error}") from error
    finally:
        connection.close()
    return time.monotonic() - started


class Verification(threading.Thread):
    """A test prompt under way, in a thread that no exit waits for. `seconds` stays None when it fails."""

    def __init__(self, uds: str, served_name: str) -> None:
        super().__init__(name="verify", daemon=True)
        self.seconds: float | None = None
        self.failure = "The test prompt ended in an unknown way"
        self._uds = uds
        self._served_name = served_name
        self.start()

    def run(self) -> None:
        """Ask once; the outcome stands in `seconds` or `failure`."""
        try:
            self.seconds = verify(self._uds, self._served_name)
        except VerificationError as error:
            self.failure = str(error)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _message(body: str) -> str:
    """The error message of an OpenAI envelope or health answer, or the start of whatever came."""
    try:
        decoded = json.loads(body)
        return str(decoded.get("reason") or decoded["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200]
