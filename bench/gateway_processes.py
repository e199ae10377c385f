"""Processes of a measurement: on which core they run, what CPU time and memory they took."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

GATEWAY_CORE, LOAD_CORE = 0, 1
_TICKS = os.sysconf("SC_CLK_TCK")


class Started:
    """A program in a session of its own, pinned with all that it starts; its output goes to a file."""

    def __init__(self, name: str, command: list[str], core: int, log: Path, env: Mapping[str, str] = {}) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["taskset", "-c", str(core), *command], stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, **env},
            )  # fmt: skip

    def check_alive(self) -> None:
        """Raises RuntimeError with the end of its log once it ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended at its start: {self.log.read_text()[-2000:]}")

    def pids(self) -> list[int]:
        return tree(self.process.pid)

    def pause(self) -> None:
        """Not a cycle for it while another one is measured."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Asked first, forced after a while."""
        self.resume()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Spent:
    """What a group of processes took between two moments."""

    cpu_s: float
    rss_mib: float


class Meter:
    """CPU seconds and memory of named groups of processes, from `with` on."""

    def __init__(self, groups: Mapping[str, Iterable[int]]) -> None:
        self._groups = {name: list(pids) for name, pids in groups.items()}
        self._before: dict[str, float] = {}
        self.spent: dict[str, Spent] = {}
        self.seconds = 0.0

    def __enter__(self) -> Meter:
        self._began = time.monotonic()
        self._before = {name: cpu_s(pids) for name, pids in self._groups.items()}
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began
        self.spent = {
            name: Spent(cpu_s(pids) - self._before[name], sum(map(rss_mib, pids)))
            for name, pids in self._groups.items()
        }


def pin(pids: Iterable[int], core: int) -> None:
    """Every thread of these processes to one core."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})


def tree(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def rss_mib(pid: int) -> float:
    """Resident memory; 0 for a process that is gone."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that these processes took so far; of one that is gone, none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = _stat(pid)
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
