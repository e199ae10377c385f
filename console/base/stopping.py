"""How a process of ours that is neither a server nor Celery hears that it should end."""

from __future__ import annotations

import signal
import threading


def asked_to_stop() -> threading.Event:
    """An event that SIGTERM or SIGINT sets. Call it on the main thread, before the work begins."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    return stop
