"""Worker processes below their shims: identity, exit reasons, adoption, no orphans."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.adapters import embedded
from engine.adapters.base import AdapterError, WorkerSpec
from engine.launchers import process
from engine.launchers.base import Launch, WorkerView
from engine.launchers.local import LocalLauncher

ROOT = Path(__file__).resolve().parent.parent.parent
SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print('up', flush=True)
time.sleep(60)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def until(check: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    made = LocalLauncher(tmp_path)
    yield made
    for replica_id in made.known():
        made.kill(replica_id)
    until(lambda: (made._reap(), not made._shims)[1])


def start(launcher: LocalLauncher, code: str, epoch: int = 1) -> WorkerView:
    log = launcher.folder("r1") / "worker.log"
    log.unlink(missing_ok=True)
    launcher.launch(Launch("r1", epoch, [sys.executable, "-c", code], {"PATH": os.environ["PATH"]}, ROOT))
    until(lambda: launcher.observe("r1") is not None and log.exists() and b"up" in log.read_bytes())
    view = launcher.observe("r1")
    assert view is not None
    return view


def test_a_worker_is_seen_alive_with_its_epoch(launcher: LocalLauncher) -> None:
    view = start(launcher, SLEEPER, epoch=7)
    assert view.alive
    assert view.epoch == 7
    assert process.start_ticks(view.pid) == view.pid_ticks


def test_a_worker_that_is_gone_before_it_was_looked_at_counts_as_ended(launcher: LocalLauncher) -> None:
    launcher.launch(Launch("r1", 1, ["/bin/true"], {"PATH": os.environ["PATH"]}, ROOT))
    until(lambda: (launcher.folder("r1") / "exit.json").exists())
    view = launcher.observe("r1")
    assert view is not None
    assert (view.alive, view.exit_reason) == (False, "exit status 0")
    assert not process.is_alive(2**22 + 1, 0)


def test_another_launcher_sees_the_same_worker(launcher: LocalLauncher) -> None:
    view = start(launcher, SLEEPER)
    assert LocalLauncher(launcher.root).observe("r1") == view


def test_a_killed_worker_says_by_which_signal(launcher: LocalLauncher) -> None:
    view = start(launcher, SLEEPER)
    os.kill(view.pid, signal.SIGKILL)
    until(lambda: (launcher.folder("r1") / "exit.json").exists())
    after = launcher.observe("r1")
    assert after is not None
    assert not after.alive
    assert after.exit_reason == "signal 9 (SIGKILL)"


def test_ending_asks_first_and_kills_a_worker_that_does_not_listen(launcher: LocalLauncher) -> None:
    start(launcher, SLEEPER)
    launcher.end("r1", 10)
    assert json.loads((launcher.folder("r1") / "exit.json").read_text())["reason"] == "exit status 0"
    start(launcher, STUBBORN, epoch=2)
    launcher.end("r1", 0.2)
    assert json.loads((launcher.folder("r1") / "exit.json").read_text())["reason"] == "signal 9 (SIGKILL)"


def test_a_worker_dies_with_its_shim(launcher: LocalLauncher) -> None:
    view = start(launcher, SLEEPER)
    shim = json.loads((launcher.folder("r1") / "worker.json").read_text())["shim_pid"]
    os.kill(shim, signal.SIGKILL)
    until(lambda: not process.is_alive(view.pid, view.pid_ticks))


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
print('up', child.pid, flush=True)
time.sleep(60)
"""


def helper(launcher: LocalLauncher) -> tuple[int, int]:
    """Pid and start time of the process that the worker started."""
    pid = int((launcher.folder("r1") / "worker.log").read_text().split()[1])
    return pid, process.start_ticks(pid) or 0


@pytest.mark.parametrize("how", ["killed by us", "killed by somebody", "killed with its shim"])
def test_what_a_worker_started_ends_with_it(launcher: LocalLauncher, how: str) -> None:
    """An engine's core is a process of its own, and holds the card: in a session of its own, or whatever it does."""
    view = start(launcher, PARENT)
    child = helper(launcher)
    assert launcher.family("r1") == [view.pid, child[0]]
    if how == "killed by us":
        launcher.kill("r1")
    elif how == "killed by somebody":
        os.kill(view.pid, signal.SIGKILL)
    else:
        os.kill(json.loads((launcher.folder("r1") / "worker.json").read_text())["shim_pid"], signal.SIGKILL)
        until(lambda: not process.is_alive(view.pid, view.pid_ticks))
        start(launcher, SLEEPER, epoch=2)  # nobody is left to end it but the next start
    until(lambda: not process.is_alive(*child))
    assert launcher.observe("r1") is not None


def test_a_worker_keeps_to_its_cores(launcher: LocalLauncher) -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os, time; print('up', os.sched_getaffinity(0), flush=True); time.sleep(60)"
    launcher.launch(Launch("r1", 1, [sys.executable, "-c", code], {"PATH": os.environ["PATH"]}, ROOT, (core,)))
    log = launcher.log_file("r1")
    until(lambda: log.exists() and b"up" in log.read_bytes())
    assert f"{{{core}}}" in log.read_text()


def test_ending_what_never_ran_is_nothing(launcher: LocalLauncher) -> None:
    launcher.end("none", 1)
    launcher.kill("none")
    assert launcher.observe("none") is None


def test_a_pid_of_another_process_is_never_signalled() -> None:
    ticks = process.start_ticks(os.getpid())
    assert ticks is not None
    assert not process.signal_if_same(os.getpid(), ticks + 1, signal.SIGKILL)
    assert process.start_ticks(2**22 + 1) is None


def spec(**parameters: object) -> WorkerSpec:
    return WorkerSpec(
        Path("/m.gguf"),
        "rev",
        "name",
        Path("/s.sock"),
        Path("/r.json"),
        2,
        30.0,
        parameters,
        {"prefill": 0.05, "auth": 1},
    )


def test_the_command_line_holds_only_checked_parameters() -> None:
    argv = embedded.command(spec(max_num_seqs=8, prefix_cache=False, dtype="fp32"))
    assert argv[argv.index("--max-num-seqs") + 1] == "8"
    assert "--no-prefix-cache" in argv
    assert argv[argv.index("--fault-delay") + 1] == "prefill=50"
    assert argv.count("--fault-delay") == 1  # auth is a phase of the gateway


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": "8"},
        {"max_num_seqs": True},
        {"--model": "/etc"},
        {"dtype": "int4"},
    ],
)
def test_any_other_parameter_is_refused_by_name(parameters: dict[str, object]) -> None:
    with pytest.raises(AdapterError, match=next(iter(parameters)).replace("-", r"\-")):
        embedded.command(spec(**parameters))


def test_a_worker_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANLIGHT_DATABASE_URL", "postgresql://secret")
    inherited = embedded.environment(2, Path("/srv/native"))
    assert {name for name in inherited if "FANLIGHT" in name} == {"FANLIGHT_NATIVE_CACHE"}
