"""Facts about processes, straight from /proc: identity by pid and start time, and death with a parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_libc = ctypes.CDLL(None, use_errno=True)


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is no such process.

    Unlike a wall-clock start time it does not move when the clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the very process that had this pid and start time still runs (a zombie does not). 0 names none."""
    return bool(ticks) and start_ticks(pid) == ticks


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent dies. For use between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number))


def let_others_look() -> None:
    """Let processes of the same user read this one's stacks where the kernel allows only parents to (Yama)."""
    _libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of whatever descendants outlive their own, instead of init."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Pids of a process's children, by whichever of its threads."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def tree(pid: int) -> list[int]:
    """A process and all its descendants, parents first."""
    found = [pid]
    for each in found:
        found += [child for child in children(each) if child not in found]
    return found


def marked(mark: str) -> list[int]:
    """Pids of processes, other than this one, whose environment has the entry `mark` ("NAME=value")."""
    needle, found = mark.encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def signal_if_same(pid: int, ticks: int, number: int) -> bool:
    """Signal a process if it is still the one that was meant. Returns whether it was."""
    if not is_alive(pid, ticks):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def describe_exit(returncode: int) -> str:
    """`exit status 1`, or `signal 9 (SIGKILL)` for what subprocess reports as -9."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"signal {-returncode} ({name})"
