"""The CPU as a device: the cores and the memory that this process may use, and what process trees hold of it."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from pathlib import Path

from engine.config import usable_cores
from engine.devices.base import DeviceFacts, Measured, Occupant
from engine.devices.processes import PROC, private_bytes

CGROUP = Path("/sys/fs/cgroup")


class CpuProvider:
    """One device. Its memory is the machine's, or less where a container may have less."""

    def __init__(self, node: str = "", proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._node = node or socket.gethostname()
        self._proc, self._cgroup = proc, cgroup
        self._ticks: tuple[int, int] | None = None  # busy and all, at the last look

    def inventory(self) -> list[DeviceFacts]:
        """See Provider."""
        cores = tuple(sorted(os.sched_getaffinity(0))[: usable_cores()])
        return [DeviceFacts(self._node, self._uid, "cpu", 0, self._model(), self._total(), cores)]

    def measure(self, occupants: Sequence[Occupant]) -> list[Measured]:
        """See Provider. What no worker holds is everything else that runs here: no single process is named."""
        here = [occupant for occupant in occupants if occupant.uid == self._uid]
        held = {o.replica: sum(private_bytes(pid, self._proc) for pid in o.pids) for o in here}
        return [Measured(self._uid, self._used(), held, utilisation=self._utilisation(), temperature=self._heat())]

    @property
    def _uid(self) -> str:
        return f"{self._node}/cpu"

    def _model(self) -> str:
        try:
            lines = (self._proc / "cpuinfo").read_text("utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return (names[0] if names and names[0] else platform.machine())[:80]

    def _total(self) -> int:
        machine = self._memory()["MemTotal"]
        limit = _number(self._cgroup / "memory.max")
        return machine if limit is None else min(machine, limit)

    def _used(self) -> int:
        """Without what the kernel can drop. In a container with a limit only its own processes count."""
        limit, current = _number(self._cgroup / "memory.max"), _number(self._cgroup / "memory.current")
        memory = self._memory()
        if limit is not None and current is not None and limit < memory["MemTotal"]:
            return max(0, current - self._droppable())
        return memory["MemTotal"] - memory["MemAvailable"]

    def _droppable(self) -> int:
        try:
            lines = (self._cgroup / "memory.stat").read_text("ascii").splitlines()
        except OSError:
            return 0
        wanted = ("inactive_file", "active_file", "slab_reclaimable")
        return sum(int(line.split()[1]) for line in lines if line.startswith(wanted))

    def _memory(self) -> dict[str, int]:
        found = {}
        for line in (self._proc / "meminfo").read_text("ascii").splitlines():
            name, _colon, rest = line.partition(":")
            found[name] = int(rest.split()[0]) << 10
        return found

    def _utilisation(self) -> float | None:
        """Share of the machine's time at work since the last look; None at the first."""
        fields = [int(word) for word in (self._proc / "stat").read_text("ascii").splitlines()[0].split()[1:9]]
        whole = sum(fields)
        now = (whole - fields[3] - fields[4], whole)
        before, self._ticks = self._ticks, now
        if before is None or now[1] <= before[1]:
            return None
        return min(1.0, max(0.0, (now[0] - before[0]) / (now[1] - before[1])))

    @staticmethod
    def _heat() -> float | None:
        zones = sorted(Path("/sys/class/thermal").glob("thermal_zone*/temp"))
        heats = [value / 1000 for zone in zones if (value := _number(zone)) is not None]
        return max(heats, default=None)


def _number(path: Path) -> int | None:
    """A file with one number; None where there is none, or "max"."""
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None
