"""A worker as small as can be: --uds, --introspection-port, --ready-file, /health, /stats, one chat completion.

`--as` makes it misbehave: crash (at once), loading (never ready), mute (its test prompt gets a 500), slow (a prompt
takes until it is told to end), stubborn (does not listen to SIGTERM), sick (says that it makes no progress). Beside its
ready file, `running` and `served` hold the numbers of requests that it says it has and had.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STATS = {
    "running": 0, "waiting": 0, "kv_usage": 0.0, "free_blocks": 8, "steps": 1, "generation_tokens": 0,
    "prompt_tokens": 0, "prefix_hit_tokens": 0,
}  # fmt: skip
COMPLETION = {
    "choices": [{"message": {"role": "assistant", "content": "Hi"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2},
}


class Answers(BaseHTTPRequestHandler):
    manner = ""
    folder = Path()

    def do_GET(self) -> None:
        if self.path == "/stats":
            self._send(
                200, {**STATS, "running": self._told("running"), "requests_finished": {"stop": self._told("served")}}
            )
        elif self.manner == "sick":
            self._send(503, {"status": "unhealthy", "reason": "no step for 12 s"})
        else:
            self._send(200, {"status": "ok"})

    def _told(self, name: str) -> int:
        path = self.folder / name
        return int(path.read_text()) if path.exists() else 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.manner == "slow":
            threading.Event().wait()
        if self.manner == "mute":
            self._send(500, {"error": {"message": "no voice"}})
        else:
            self._send(200, COMPLETION)

    def _send(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def address_string(self) -> str:
        return "local"

    def log_message(self, *_args: Any) -> None:
        """Quiet."""


class OnSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--introspection-port", type=int, default=0)
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--as", dest="manner", default="")
    options = parser.parse_args()
    Answers.manner, Answers.folder = options.manner, options.ready_file.parent
    if options.manner == "crash":
        print("out of luck", flush=True)
        return 3
    side = ThreadingHTTPServer(("127.0.0.1", options.introspection_port), Answers)
    main_server = OnSocket(options.uds, Answers)
    for server in (side, main_server):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    ended = threading.Event()
    if options.manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if options.manner != "loading":
        facts = {"pid": os.getpid(), "model": "fake", "introspection_url": f"http://127.0.0.1:{side.server_port}"}
        options.ready_file.with_suffix(".new").write_text(json.dumps(facts))
        options.ready_file.with_suffix(".new").replace(options.ready_file)
    while not ended.wait(0.05):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
