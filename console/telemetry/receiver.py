"""Takes engines' OTLP spans over loopback HTTP, beside the shipper: POST /v1/traces, protobuf, with a bearer token.

The address is chosen once per installation and kept, so that workers started before a restart still find it. What
cannot be kept is counted and dropped: a span is never worth a request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from django.db import Error as DatabaseError
from django.db import close_old_connections
from django.utils import timezone

from console.base.layout import write_atomically
from console.errors import first_line
from console.telemetry import engine_spans

log = logging.getLogger(__name__)

PATH = "/v1/traces"
MAX_BODY = 4_000_000
MAX_AT_ONCE = 2  # each has a connection to the database while it writes
_ZIPPED = 16 + zlib.MAX_WBITS


class Address:
    """Where the receiver listens, and the token that it wants: kept in a file (0600) of the data folder."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> tuple[str, str] | None:
        """URL and token; None while no receiver has ever listened."""
        try:
            facts = json.loads(self._file.read_text())
            return f"http://127.0.0.1:{int(facts['port'])}{PATH}", str(facts["token"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def bind(self) -> Receiver:
        """Listen where it was last time, or where there is room, and keep that."""
        facts: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(self._file.read_text())
        token = str(facts.get("token") or secrets.token_urlsafe(32))
        try:
            server = Receiver(int(facts.get("port") or 0), token)
        except OSError:
            server = Receiver(0, token)
        write_atomically(self._file, json.dumps({"port": server.server_port, "token": token}))
        return server


class Receiver(ThreadingHTTPServer):
    """The server; `start` runs it in a thread of its own."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, token: str) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = token
        self.room = threading.BoundedSemaphore(MAX_AT_ONCE)
        self.kept = self.dropped = 0

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, name="otlp-receiver", daemon=True).start()

    def take(self, body: bytes) -> None:
        """Keep the spans of one export. Raises ValueError for what is none."""
        spans = list(engine_spans.read(body))
        try:
            close_old_connections()
            self.kept += engine_spans.keep(spans, timezone.now())
        except DatabaseError as error:
            self.dropped += len(spans)
            log.warning("engine spans: %d dropped, the database does not take them: %s", len(spans), first_line(error))
        finally:
            close_old_connections()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver
    timeout = 5

    def do_POST(self) -> None:
        """One export."""
        if not self.server.room.acquire(blocking=False):
            self._answer(503)
            return
        try:
            self._answer(self._status())
        finally:
            self.server.room.release()

    def _status(self) -> int:
        given = self.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self.server.token.encode()):
            return 401
        length = self.headers.get("content-length", "")
        if self.path != PATH:
            return 404
        if not (length.isascii() and length.isdigit()) or len(length) > 9 or int(length) > MAX_BODY:
            return 413
        try:
            self.server.take(self._body(int(length)))
        except ValueError:
            return 400
        return 200

    def _body(self, length: int) -> bytes:
        body = self.rfile.read(length)
        if self.headers.get("content-encoding", "") != "gzip":
            return body
        unpacked = zlib.decompressobj(_ZIPPED)
        try:
            whole = unpacked.decompress(body, MAX_BODY)
        except zlib.error as error:
            raise ValueError("The body is not gzip.") from error
        if unpacked.unconsumed_tail:
            raise ValueError("The body is too large unpacked.")
        return whole

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a line per export would tell nothing."""
