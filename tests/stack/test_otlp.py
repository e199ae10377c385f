"""Traces of requests and of the console's pages reach a collector, where one is configured."""

from __future__ import annotations

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.stack import MODEL, Stack, eventually, get, running_stack


def test_a_page_and_a_request_are_exported_to_the_configured_collector() -> None:
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
            endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
            with running_stack(OTLP_ENDPOINT=endpoint, OTLP_SHARE="1") as stack:
                get(f"{stack.url}/login/")
                request_id = ask(stack)
                for needle in (b"fanlight-console", b"fanlight-gateway", request_id.encode()):
                    eventually(lambda needle=needle: needle in b"".join(received), 30)
        finally:
            server.shutdown()


def ask(stack: Stack) -> str:
    """One short answer; its request id."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{stack.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"authorization": f"Bearer {stack.key()}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.headers["x-request-id"])
