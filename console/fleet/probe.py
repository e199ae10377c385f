"""Asks workers how they are, each in the way of its engine, and has them generate once before they take requests."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from engine.adapters import adapter

PROBE_TIMEOUT_S = 2.0
VERIFY_TIMEOUT_S = 120.0
MEASURED_TIMES = 6
MEASURED_S = 5.0  # no further prompt after that long
MOST_WORDS = 400  # of a prompt that tells what a token of it costs


class VerificationError(Exception):
    """A worker did not answer the test prompt; the message says what it did instead."""


class NoAnswer(Exception):
    """A worker did not answer a probe in time, or not with sense."""


@dataclass(frozen=True)
class Where:
    """A worker to be asked: which engine it is, and where it listens."""

    address: str  # "http://127.0.0.1:1234", or the path of a Unix socket
    engine: str = "embedded"
    served_name: str = ""  # of its model: for who has to prove that it still answers
    max_num_seqs: int = 0
    max_step_tokens: int = 0  # of its largest step; 0: unknown
    token_s: float = 0.0  # what a token of a prompt takes; 0: not measured


@dataclass(frozen=True)
class Answer:
    """What a worker says of itself: whether it is alive, why not, and its stats with `at` (wall seconds)."""

    healthy: bool
    reason: str
    stats: dict[str, Any]


def ask(where: Where) -> Answer:
    """Ask for health and stats once. Raises NoAnswer."""
    engine = adapter(where.engine)
    try:
        status, bodies = _read(where.address, engine.stats_paths)
        stats = engine.stats(bodies) if set(bodies) >= set(engine.stats_paths) else {}
        if status == 200 and not stats:
            raise ValueError(f"no {' and '.join(engine.stats_paths)}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(str(error)) from error
    reason = "" if status == 200 else _message(bodies["/health"]) or "its engine is dead"
    return Answer(status == 200, reason, {**stats, "at": time.time()} if stats else {})


def limit_pool(uds: str, blocks: int) -> int:
    """Have an embedded engine keep to so many KV blocks, and return to how many. Raises OSError, HTTPException, …"""
    connection = _UnixConnection(uds, PROBE_TIMEOUT_S)
    try:
        body = json.dumps({"usable_blocks": blocks})
        connection.request("PUT", "/pool", body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        if response.status != 200:
            raise ValueError(f"status {response.status}: {_message(text)}")
        return int(json.loads(text)["usable_blocks"])
    finally:
        connection.close()


def ready(engine: str, uds: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Facts of a worker that writes no ready file, once its health check says 200; None until then."""
    paths = adapter(engine).facts_paths
    try:
        status, bodies = _read(uds, paths)
        if status != 200 or not set(bodies) >= set(paths):
            return None
        return adapter(engine).facts(bodies, parameters)
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError):
        return None


def verify(uds: str, served_name: str, timeout_s: float = VERIFY_TIMEOUT_S) -> float:
    """Have the worker generate two tokens. Returns the seconds it took; raises VerificationError."""
    started = time.monotonic()
    if generate(uds, served_name, "Hi", timeout_s)["completion_tokens"] < 1:
        raise VerificationError("The test prompt got no token")
    return time.monotonic() - started


def measure_token_s(uds: str, served_name: str, words: int, timeout_s: float = VERIFY_TIMEOUT_S) -> float:
    """Seconds that a token of a prompt takes: the least of some prompts of so many words that no cache knows.

    0 where the worker takes no such prompt. The first waits for memory and compilation, any for others on its cores.
    """
    times: list[float] = []
    began = time.monotonic()
    while len(times) < MEASURED_TIMES and (not times or time.monotonic() - began < MEASURED_S):
        prompt = " ".join(str(random.randint(1000, 9999)) for _ in range(words))  # noqa: S311 - no secret
        started = time.monotonic()
        try:
            tokens = int(generate(uds, served_name, prompt, timeout_s, max_tokens=1)["prompt_tokens"])
            times.append((time.monotonic() - started) / tokens)
        except (VerificationError, KeyError, TypeError, ValueError, ArithmeticError):
            return 0.0
    return min(times)


def measured_words(max_model_len: int) -> int:
    """Numbers of four digits that fill much of a window and no more, at five tokens each at the most."""
    return min(MOST_WORDS, max_model_len // 8)


def generate(uds: str, served_name: str, prompt: str, timeout_s: float, **more: Any) -> dict[str, Any]:
    """Have the worker answer, by two tokens unless `more` says else. Returns its usage; raises VerificationError."""
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": served_name, "messages": messages, "max_tokens": 2, "temperature": 0, **more})
    connection = _UnixConnection(uds, timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        if response.status != 200:
            raise VerificationError(f"The test prompt got status {response.status}: {_message(text)}")
        usage = dict(json.loads(text)["usage"])
        usage["completion_tokens"] = int(usage["completion_tokens"])
        return usage
    except (OSError, http.client.HTTPException, ValueError, OverflowError, KeyError, TypeError) as error:
        raise VerificationError(f"The test prompt got no answer: {error}") from error
    finally:
        connection.close()


class Verification(threading.Thread):
    """A test prompt under way, in a thread that no exit waits for. `seconds` stays None when it fails.

    With `words`, longer ones of that many after it: `token_s` is then what a token of a prompt takes, or 0.
    """

    def __init__(self, uds: str, served_name: str, timeout_s: float = VERIFY_TIMEOUT_S, words: int = 0) -> None:
        super().__init__(name="verify", daemon=True)
        self.seconds: float | None = None
        self.token_s = 0.0
        self.failure = "The test prompt ended in an unknown way"
        self._asked = (uds, served_name, timeout_s)
        self._words = words
        self.start()

    def run(self) -> None:
        """Ask; the outcome stands in `seconds` or `failure`."""
        try:
            seconds = verify(*self._asked)
        except VerificationError as error:
            self.failure = str(error)
            return
        if self._words:
            uds, served_name, timeout_s = self._asked
            self.token_s = measure_token_s(uds, served_name, self._words, timeout_s)
        self.seconds = seconds


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _read(address: str, paths: tuple[str, ...]) -> tuple[int, dict[str, str]]:
    """The status of /health, and the bodies of it and of those `paths` that answered 200. Raises OSError, …"""
    connection = _connection(address)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        status, bodies = response.status, {"/health": response.read().decode(errors="replace")}
        for path in paths:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read().decode(errors="replace")
            if response.status == 200:
                bodies[path] = body
    finally:
        connection.close()
    return status, bodies


def _connection(address: str) -> http.client.HTTPConnection:
    if not address.startswith("http://"):
        return _UnixConnection(address, PROBE_TIMEOUT_S)
    parts = urlsplit(address)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PROBE_TIMEOUT_S)


def _message(body: str) -> str:
    """The error message of an OpenAI envelope or health answer, or the start of whatever came."""
    try:
        decoded = json.loads(body)
        return str(decoded.get("reason") or decoded["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200]
