"""A program that does a step of the catalog's work: heard line by line, in a bounded time, ended with all it began."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from engine.launchers import process

TICK_S = 1.0
LONGEST_LINE = 1 << 20  # bytes; a longer one is cut


class TookTooLong(Exception):
    """The program was not done in its time; the message says how long that was."""


class Tool:
    """The running program. What it writes to either stream comes in one."""

    def __init__(self, popen: subprocess.Popen[bytes], timeout_s: float) -> None:
        self._popen = popen
        self._timeout_s = timeout_s
        self._deadline = monotonic() + timeout_s

    def lines(self) -> Iterator[str]:
        """Lines as they come; "" each second in which none did, so that who waits can give up. Raises TookTooLong."""
        assert self._popen.stdout is not None
        descriptor, rest = self._popen.stdout.fileno(), b""
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        while True:
            if not waiting.poll(1000 * min(TICK_S, self._left())):
                yield ""
                continue
            part = os.read(descriptor, 1 << 16)
            if not part:
                break
            *whole, rest = (rest + part).split(b"\n")
            if len(rest) > LONGEST_LINE:
                whole, rest = [*whole, rest], b""
            yield from (line.decode(errors="replace").rstrip() for line in whole)
        yield rest.decode(errors="replace").rstrip()

    def wait(self) -> int:
        """How it ended, once its lines are read. Raises TookTooLong."""
        try:
            return self._popen.wait(self._left())
        except subprocess.TimeoutExpired:
            raise self._too_long() from None

    def _left(self) -> float:
        left = self._deadline - monotonic()
        if left <= 0:
            raise self._too_long()
        return left

    def _too_long(self) -> TookTooLong:
        return TookTooLong(f"it was not done after {self._timeout_s:,.0f} s")


@contextmanager
def started(
    command: Sequence[str], timeout_s: float, env: Mapping[str, str], cwd: Path | None = None
) -> Iterator[Tool]:
    """Start a program in a process group of its own; whatever ends this block early ends the whole group."""
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=end_with_us,
    ) as popen:  # fmt: skip
        try:
            yield Tool(popen, timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            raise


def end_with_us() -> None:
    """In a child before it begins: it ends with a job that is killed; what it started itself may end later."""
    process.die_with_parent(signal.SIGKILL)
