"""What must be true before anything starts; each "no" says what to do."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from console.base.layout import Layout
from engine.launchers import process


class CannotStartError(Exception):
    """The start is refused; the message says why and what to do."""


class AlreadyRunningError(Exception):
    """Another supervisor serves this data folder; `facts` is its state file."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__("already running")
        self.facts = facts


def lock(layout: Layout) -> IO[str]:
    """Hold the installation's lock for as long as the returned file is open. Raises AlreadyRunningError."""
    file = (layout.run / "supervisor.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise AlreadyRunningError(read_state(layout)) from None
    return file


def check_disk(layout: Layout, minimum_bytes: int) -> None:
    """Refuse to start on a disk that is nearly full: the ledger could not be written."""
    for folder in {layout.data, layout.servers}:
        free = shutil.disk_usage(folder).free
        if free < minimum_bytes:
            raise CannotStartError(
                f"Only {free / 1e6:,.0f} MB are free on the disk of {folder}; "
                f"{minimum_bytes / 1e6:,.0f} MB are needed. "
                "Free some space, or set FANLIGHT_DATA_DIR to a folder on a larger disk."
            )


def check_port(bind: str, port: int) -> None:
    """Refuse a port that something else listens on."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise CannotStartError(
                    f"Port {port} on {bind} is taken by another program. "
                    f"Stop it, or choose another port: FANLIGHT_PORT={port + 1} make up"
                ) from None
            raise CannotStartError(f"Cannot listen on {bind}:{port}: {error.strerror}.") from None


def read_state(layout: Layout) -> dict[str, Any]:
    """The state file of the last supervisor; empty when there is none or it is damaged."""
    try:
        facts = json.loads(layout.state_file.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def end_leftovers(layout: Layout, say: Callable[[str], None]) -> None:
    """End processes of an earlier supervisor that was killed. A pid given to another program is left alone."""
    left = [entry for entry in read_state(layout).get("processes", []) if entry.get("pid") and entry.get("pid_ticks")]
    left = [entry for entry in left if process.is_alive(entry["pid"], entry["pid_ticks"])]
    if not left:
        return
    say("Ending what an earlier run left: " + ", ".join(entry["name"] for entry in left))
    for entry in left:
        number = signal.SIGINT if entry["name"] == "postgres" else signal.SIGTERM
        process.signal_if_same(entry["pid"], entry["pid_ticks"], number)
    deadline = time.monotonic() + 5
    while any(process.is_alive(entry["pid"], entry["pid_ticks"]) for entry in left):
        if time.monotonic() > deadline:
            for entry in left:
                number = signal.SIGQUIT if entry["name"] == "postgres" else signal.SIGKILL
                process.signal_if_same(entry["pid"], entry["pid_ticks"], number)
            deadline = time.monotonic() + 5
        time.sleep(0.05)
    _forget_sockets(layout)


def _forget_sockets(layout: Layout) -> None:
    layout.valkey_socket.unlink(missing_ok=True)


def clean_stale_postmaster(layout: Layout) -> None:
    """Remove a postmaster.pid whose process is gone or is something else: its pid may have been given away."""
    pid_file = layout.postgres_data / "postmaster.pid"
    try:
        pid = int(pid_file.read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        ours = name == "postgres" and Path(f"/proc/{pid}/cwd").readlink() == layout.postgres_data
    except OSError:
        ours = False
    if not ours:
        pid_file.unlink(missing_ok=True)
