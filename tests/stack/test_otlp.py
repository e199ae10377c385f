"""Traces of the console's pages reach a collector, where one is configured."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.stack import eventually, get, running_stack


def test_a_page_is_exported_to_the_configured_collector() -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with running_stack(OTLP_ENDPOINT=f"http://127.0.0.1:{server.server_port}/v1/traces") as stack:
                get(f"{stack.url}/login/")
                eventually(lambda: received, 30)
        finally:
            server.shutdown()
    assert b"fanlight-console" in b"".join(received)
