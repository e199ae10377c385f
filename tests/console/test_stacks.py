"""Stacks of processes that do not answer, read by py-spy."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.fleet import stacks

STUCK = """
import threading
def waits_for_good():
    threading.Event().wait()
thread = threading.Thread(target=waits_for_good, name="engine-steps")
thread.start()
print("up", flush=True)
thread.join()
"""


@pytest.fixture
def stuck() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_function_that_waits_is_named(stuck: subprocess.Popen[bytes], stopped: bool) -> None:
    if stopped:
        stuck.send_signal(signal.SIGSTOP)
    text = stacks.capture([stuck.pid])
    assert '"engine-steps"' in text
    assert "waits_for_good (<string>:4)" in text


def test_what_cannot_be_read_is_said() -> None:
    assert stacks.capture([]) == "No process was left to look at"
    assert stacks.capture([2**22 + 1]).startswith(f"Process {2**22 + 1}: ")


def test_it_takes_no_longer_than_it_may(
    stuck: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(stacks, "_PY_SPY", slow)
    began = time.monotonic()
    assert "could not be read in time" in stacks.capture([stuck.pid, stuck.pid], timeout_s=0.5)
    assert time.monotonic() - began < 30
    monkeypatch.setattr(stacks, "_PY_SPY", tmp_path / "none")
    assert "py-spy cannot be run" in stacks.capture([stuck.pid])
