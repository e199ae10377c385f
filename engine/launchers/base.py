"""What a launcher is: starts, watches and ends the process tree of one worker.

Nothing here knows the console; a controller passes in ids, command lines and folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Launch:
    """One start of one replica's worker."""

    replica_id: str
    epoch: int
    argv: Sequence[str]
    env: Mapping[str, str]  # complete: a worker inherits nothing
    cwd: Path
    cores: tuple[int, ...] = ()  # ids of those it may run on; empty: any


@dataclass(frozen=True)
class WorkerView:
    """What can be seen of a worker from outside, without asking it anything."""

    epoch: int
    pid: int
    pid_ticks: int  # start time in clock ticks since boot: with pid, names a process for as long as the machine is up
    alive: bool
    exit_reason: str = ""  # "exit status 1", "signal 9 (SIGKILL)"; empty while alive or unknown
    ready: Mapping[str, Any] = field(default_factory=dict)  # the worker's ready file; empty until it is there


class Launcher(Protocol):
    """Starts workers that outlive the controller, one a replica, and ends them."""

    def launch(self, launch: Launch) -> None:
        """Start a worker; any of an earlier epoch must have ended. Raises OSError."""
        ...

    def observe(self, replica_id: str) -> WorkerView | None:
        """The newest worker of the replica; None when none was ever started."""
        ...

    def end(self, replica_id: str, grace_s: float) -> None:
        """Have it drain for up to `grace_s` seconds; returns when it is gone."""
        ...

    def kill(self, replica_id: str) -> None:
        """End it at once, whatever it is doing."""
        ...

    def known(self) -> list[str]:
        """Ids of replicas that have, or had, a worker."""
        ...

    def family(self, replica_id: str) -> list[int]:
        """Pids of the replica's live worker and its descendants, the worker first; empty without one."""
        ...

    def ready_file(self, replica_id: str) -> Path:
        """Where the worker must say that it is ready."""
        ...

    def log_file(self, replica_id: str) -> Path:
        """The worker's output."""
        ...
