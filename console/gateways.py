"""`manage.py gateway --workers N`: gateway processes on one listening socket, kept running by their parent.

The parent opens the socket and never accepts; each worker inherits it, so that no connection is lost when one of them
ends. A worker that is told to stop leaves the socket to the others first, then drains.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from django.conf import settings

from console.environment import ROOT
from console.supervisor.child import Child, Program

BACKLOG = 2048
EXTRA_S = 15.0  # after the drain: requests are cut and settled
_TEND_S = 0.2


class GatewayProcesses:
    """The parent. `run` returns once every worker has drained and ended."""

    def __init__(self, bind: str, port: int, workers: int) -> None:
        self._listener = listening(bind, port)
        self._stop = threading.Event()
        self._hurry = threading.Event()
        layout, share = settings.LAYOUT, settings.ENV["LOG_TOTAL_BYTES"] // 8 // workers
        self._workers = [
            Child(self._program(number), layout.logs / f"gateway-{number}.log", share, _show)
            for number in range(1, workers + 1)
        ]

    def run(self) -> None:
        """Keep the workers running until a signal; the second one shortens the drain."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            for worker in self._workers:
                worker.start()
            while not self._stop.wait(_TEND_S):
                for worker in self._workers:
                    happened = worker.tend()
                    if happened:
                        _show("gateway", happened)
        finally:
            self._end()

    def _end(self) -> None:
        self._listener.close()
        deadline = time.monotonic() + settings.ENV["DRAIN_SECONDS"] + EXTRA_S
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            worker.await_end(deadline, self._hurry)
            worker.close()

    def _on_signal(self, _number: int, _frame: object) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _program(self, number: int) -> Program:
        descriptor = self._listener.fileno()
        argv = (sys.executable, str(ROOT / "manage.py"), "gateway", "--inherited", str(descriptor))
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "DJANGO_SETTINGS_MODULE": "console.settings"}
        grace = settings.ENV["DRAIN_SECONDS"] + EXTRA_S
        return Program(
            f"gateway-{number}", argv, env, str(ROOT), 0, grace_s=grace, identity={"pass_fds": (descriptor,)}
        )


def listening(bind: str, port: int) -> socket.socket:
    """A socket that accepts from here on. Raises OSError where the address is taken."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _show(name: str, text: str) -> None:
    sys.stdout.write(f"{name}: {text}\n")
    sys.stdout.flush()
