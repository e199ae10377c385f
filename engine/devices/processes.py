"""Process trees and their memory, from /proc."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


def trees(roots: Iterable[int], proc: Path = PROC) -> dict[int, tuple[int, ...]]:
    """For each root that lives, its pid and those of all its descendants."""
    children: dict[int, list[int]] = {}
    living = set()
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            parent = _parent(folder)
            if parent is not None:
                living.add(int(folder.name))
                children.setdefault(parent, []).append(int(folder.name))
    return {root: _below(root, children) for root in roots if root in living}


def private_bytes(pid: int, proc: Path = PROC) -> int:
    """Memory that ends with the process: anonymous and shared pages. 0 where there is no such process.

    Not pages of files: weights mapped from disk and libraries can be dropped, and several workers share them.
    """
    try:
        status = (proc / str(pid) / "status").read_text("ascii", errors="replace")
    except OSError:
        return 0
    kib = 0
    for line in status.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kib += int(line.split()[1])
    return kib << 10


def name_of(pid: int, proc: Path = PROC) -> str:
    """The command's name; empty where there is no such process."""
    try:
        return (proc / str(pid) / "comm").read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _parent(folder: Path) -> int | None:
    """The parent's pid; None for what has ended, zombies among it."""
    try:
        stat = (folder / "stat").read_text("ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[1])


def _below(root: int, children: dict[int, list[int]]) -> tuple[int, ...]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return tuple(sorted(found))
