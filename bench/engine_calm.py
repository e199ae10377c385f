"""Measuring beside other work: who takes the cores, waiting until they are left alone, repeating what was disturbed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

CORES = os.cpu_count() or 1
CLEAN = 0.05  # of the cores' time taken by others: a run above it is repeated
ATTEMPTS = 3
_TICKS = os.sysconf("SC_CLK_TCK")
T = TypeVar("T")


class Working(Protocol):
    """A server whose own work is not a disturbance."""

    def cpu_seconds(self) -> float:
        """CPU time so far."""


class Calm:
    """Waits for others to leave the cores alone and repeats what they disturbed, within a budget for the whole run."""

    def __init__(self, budget_s: float) -> None:
        self.left_s = budget_s

    def measured(self, load: Callable[[], T], server: Working | None = None) -> tuple[T, float]:
        """The load's figures and the share of the cores that others took; of several tries the cleanest.

        Without a server the load starts and ends its own.
        """
        tries = []
        for _ in range(ATTEMPTS):
            self.wait(server)
            before, began = _others(server), time.monotonic()
            figures = load()
            took = time.monotonic() - began
            others = max((_others(server) - before) / took / CORES, 0.0)
            tries.append((figures, others))
            if others <= CLEAN or self.left_s < took:
                break
            self.left_s -= took
        return min(tries, key=lambda each: each[1])

    def wait(self, server: Working | None, patience_s: float = 10.0) -> None:
        """Until others leave the cores alone for a moment, but not longer than the patience lasts."""
        start = time.monotonic()
        deadline = start + min(patience_s, self.left_s)
        while time.monotonic() < deadline:
            before, began = _others(server), time.monotonic()
            time.sleep(0.3)
            if (_others(server) - before) / (time.monotonic() - began) / CORES <= CLEAN:
                return
        self.left_s -= time.monotonic() - start


def _others(server: Working | None) -> float:
    """CPU seconds of everything but this process, the server, and children that have ended."""
    own = server.cpu_seconds() if server else sum(os.times()[2:4])
    return cpu_of_machine() - own - cpu_of(os.getpid())


def prioritise(pid: int, priority: int) -> None:
    """Set the nice value of a process. Where Linux groups sessions for scheduling, it counts for the group only."""
    os.setpriority(os.PRIO_PROCESS, pid, priority)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(priority))


def process_groups() -> list[tuple[int, int]]:
    """(pid, process group) of every process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.append((int(entry.name), int(_stat(int(entry.name))[2])))
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def cpu_of(pid: int) -> float:
    """CPU seconds of one process; 0 when it is gone."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def cpu_of_machine() -> float:
    """CPU seconds that all cores have worked since the start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICKS
