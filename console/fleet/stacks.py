"""What the threads of a stuck worker are doing, read from outside by py-spy: the worker itself may not answer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

TIMEOUT_S = 5.0  # for all processes of a worker together: its requests wait for the replacement
MOST_PROCESSES = 8
MOST_CHARACTERS = 60_000
_PY_SPY = Path(sys.executable).with_name("py-spy")
# With the frames below Python where that works. A stopped process lets nobody pause it: it is read as it lies there.
_MANNERS = ("--native", "--nonblocking")


class Capture(threading.Thread):
    """A capture under way, in a thread that no exit waits for. `text` is there once it has ended."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(name="stacks", daemon=True)
        self.text = ""
        self._pids = tuple(pids)
        self.start()

    def run(self) -> None:
        """Read the stacks once."""
        self.text = capture(self._pids)


def capture(pids: Sequence[int], timeout_s: float = TIMEOUT_S) -> str:
    """The stacks of those processes that are Python's, or why they could not be read. Takes at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    parts, failures = [], []
    for pid in pids[:MOST_PROCESSES]:
        text, failure = _dump(pid, deadline)
        if text:
            parts.append(text)
        elif failure:
            failures.append(f"Process {pid}: {failure}")
    return "\n\n".join(parts or failures or ["No process was left to look at"])[:MOST_CHARACTERS]


def _dump(pid: int, deadline: float) -> tuple[str, str]:
    """Stacks of one process, or why there are none."""
    failure = ""
    for manner in _MANNERS[_stopped(pid) :]:
        left = deadline - time.monotonic()
        if left <= 0:
            return "", failure or "there was no time left"
        share = left if manner == _MANNERS[-1] else left * 0.6
        command = [str(_PY_SPY), "dump", "--pid", str(pid), manner]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=share, check=False)
        except subprocess.TimeoutExpired:
            failure = "its stacks could not be read in time"
            continue
        except OSError as error:
            return "", f"py-spy cannot be run: {error}"
        if result.returncode == 0:
            return result.stdout.strip(), ""
        failure = _why(result.stderr)
    return "", failure


def _stopped(pid: int) -> bool:
    """Whether nobody could pause it, since it is stopped already: trying would take seconds of its requests' wait."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _why(said: str) -> str:
    """The first line of py-spy's complaint, and what helps where the kernel forbids it."""
    line = next((line.strip() for line in said.splitlines() if line.strip()), "py-spy said nothing")
    if "ermission" in said:
        return f"{line} (may this user trace processes? See kernel.yama.ptrace_scope)"
    return line
