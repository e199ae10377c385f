"""One supervised process: started with its parent's death in mind, its output shown, kept and bounded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from engine.launchers import process

_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_STEADY_S = 60.0  # up for this long: earlier deaths are forgiven
HURRY_S = 3.0  # what is left of any grace after a second Ctrl-C
_LAST_S = 5.0  # between the last signal and SIGKILL


@dataclass(frozen=True)
class Program:
    """What to run. `group` orders the stop: lower groups stop first."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    group: int
    stop_signal: signal.Signals = signal.SIGTERM
    last_signal: signal.Signals = signal.SIGKILL  # when the stop signal was not enough; SIGKILL follows in any case
    grace_s: float = 10.0
    identity: Mapping[str, Any] = field(default_factory=dict)  # user=, group= for subprocess


class Child:
    """A Program that is kept running until `stop`."""

    def __init__(self, program: Program, log_file: Path, log_bytes: int, show: Callable[[str, str], None]) -> None:
        self.program = program
        self.restarts = 0
        self.state = "stopped"
        self.why = ""  # how it ended the last time
        self._show = show
        self._log = RotatingFile(log_file, log_bytes)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._started_at = 0.0
        self._not_before = 0.0
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process in a session of its own; the kernel signals it should this supervisor be killed."""
        number = self.program.stop_signal
        self._process = subprocess.Popen(
            list(self.program.argv),
            env=dict(self.program.env),
            cwd=self.program.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: process.die_with_parent(number),
            **self.program.identity,
        )
        self._started_at = time.monotonic()
        self.state = "running"
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def tend(self) -> str | None:
        """Notice a death and restart after a back-off. Returns a sentence when something happened."""
        if self.state == "stopped" or self._process is None:
            return None
        if self.state == "waiting":
            if time.monotonic() < self._not_before:
                return None
            self.restarts += 1
            try:
                self.start()
            except OSError as error:  # no memory or process to be had just now
                return self._back_off(f"could not be started: {error}")
            return f"{self.program.name} restarted (restart {self.restarts})"
        code = self._process.poll()
        return None if code is None else self._back_off(f"ended: {process.describe_exit(code)}")

    def _back_off(self, why: str) -> str:
        steady = time.monotonic() - self._started_at > _STEADY_S
        self._deaths = 1 if steady else self._deaths + 1
        wait = _BACKOFF_S[min(self._deaths - 1, len(_BACKOFF_S) - 1)]
        self._not_before = time.monotonic() + wait
        self.state = "waiting"
        self.why = why
        return f"{self.program.name} {why}; starting it again in {wait:g} s"

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process is None or self._process.poll() is not None

    def ask_to_stop(self) -> None:
        """Send the stop signal; `await_end` waits for it."""
        self.state = "stopped"
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(self.program.stop_signal)

    def await_end(self, deadline: float, hurry: threading.Event) -> None:
        """Wait for the end until `deadline` (monotonic), at most HURRY_S once hurried, then insist."""
        hurried = False
        while not self.ended():
            if hurry.is_set() and not hurried:
                hurried = True
                deadline = min(deadline, time.monotonic() + HURRY_S)
            if time.monotonic() > deadline:
                self._insist()
                return
            time.sleep(0.02)

    def _insist(self) -> None:
        assert self._process is not None
        self._process.send_signal(self.program.last_signal)
        try:
            self._process.wait(timeout=_LAST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._show(self.program.name, "did not end in time and was killed")

    def facts(self) -> dict[str, Any]:
        """What status shows of it."""
        pid = self.pid
        return {
            "name": self.program.name,
            "pid": pid,
            "pid_ticks": process.start_ticks(pid) if pid else None,
            "state": self.state,
            "restarts": self.restarts,
        }

    def _read(self, running: subprocess.Popen[str]) -> None:
        assert running.stdout is not None
        for line in running.stdout:
            self._log.write(line)
            self._show(self.program.name, readable(line))
        running.stdout.close()

    def close(self) -> None:
        """Close the log; the process must have ended. A grandchild that kept the pipe open is not waited for."""
        if self._reader is not None:
            self._reader.join(timeout=1)
        self._log.close()


class RotatingFile:
    """A log file of bounded size: the newest half in `path`, the half before it in `path.1`."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit = limit_bytes // 2
        self._file = _private(path)

    def write(self, line: str) -> None:
        """Append a line. A full disk loses log lines, never the process."""
        try:
            if self._file.tell() > self._limit:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                fresh = _private(self._path)  # only then let go of the old one
                self._file.close()
                self._file = fresh
            self._file.write(line)
            self._file.flush()
        except (OSError, ValueError):  # a full disk; closed while stopping
            return

    def flush(self) -> None:
        """Every line is flushed as it is written."""

    def isatty(self) -> bool:
        """No terminal, so no colours."""
        return False

    def close(self) -> None:
        """Write nothing any more."""
        with contextlib.suppress(OSError):  # what a full disk kept from being written
            self._file.close()


def _private(path: Path) -> TextIO:
    """A file to append to that only its owner can read: logs name tenants and addresses."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8")


def readable(line: str) -> str:
    """A JSON log line as `LEVEL message`; any other line as it is."""
    line = line.rstrip()
    if not line.startswith("{"):
        return line
    try:
        facts = json.loads(line)
    except ValueError:
        return line
    level = facts.get("level", "INFO")
    text = str(facts.get("message", facts.get("event", line)))
    text = text if level == "INFO" else f"{level} {text}"
    return f"{text}\n{facts['exc_info']}" if facts.get("exc_info") else text
