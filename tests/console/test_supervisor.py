"""The supervisor over real processes: order of the stop, hurry, restarts, and nothing left when it is killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from console.base.layout import Layout
from console.base.models import User
from console.supervisor import bootstrap, preflight
from console.supervisor import child as child_module
from console.supervisor import supervisor as module
from console.supervisor.child import Child, Program, RotatingFile
from console.supervisor.preflight import CannotStartError
from console.supervisor.programs import CONTROL, SERVERS, SHIP, WEB
from console.supervisor.supervisor import Supervisor
from console.supervisor.terminal import Terminal
from engine.launchers import process
from engine.launchers.base import Launch
from engine.launchers.local import LocalLauncher

ROOT = Path(__file__).parents[2]
# Notes its end, and takes its time for it when told to.
WORKS = """
import signal, sys, time
name, notes, patience = sys.argv[1], sys.argv[2], float(sys.argv[3])
def end(*_):
    time.sleep(patience)
    open(notes, "a").write(name + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(name + " works", flush=True)
while True:
    time.sleep(60)
"""


def until(check: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


class House:
    """A supervisor whose children are small, and what they noted."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.shown = io.StringIO()
        self.notes = layout.data / "notes"
        self.notes.touch()
        self.supervisor = Supervisor(Terminal(self.shown))

    def add(self, name: str, group: int, patience_s: float = 0, code: str = WORKS) -> Child:
        argv = [sys.executable, "-c", code, name, str(self.notes), str(patience_s)]
        child = self.supervisor._adopt(Program(name, argv, os.environ, "/", group, grace_s=60))
        child.start()
        return child

    def until_all_work(self) -> None:
        until(lambda: all(f"{c.program.name} works" in self.shown.getvalue() for c in self.supervisor.children))

    def ended(self) -> list[str]:
        return self.notes.read_text().split()


@pytest.fixture
def layout(tmp_path: Path, settings: Any) -> Layout:
    settings.LAYOUT = Layout(tmp_path / "data")
    settings.LAYOUT.create()
    return settings.LAYOUT


@pytest.fixture
def house(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(module.connections, "close_all", lambda: None)  # the test's own database goes on
    made = House(layout)
    yield made
    made.supervisor.hurry.set()
    made.supervisor.stop()
    assert not any(child.pid for child in made.supervisor.children)


def start_worker(house: House, patience_s: float) -> None:
    argv = [sys.executable, "-c", WORKS, "worker", str(house.notes), str(patience_s)]
    LAUNCHERS.append(LocalLauncher(house.layout.workers))
    LAUNCHERS[-1].launch(Launch("r1", 1, argv, {"PATH": os.environ["PATH"]}, ROOT))
    log = house.layout.workers / "r1" / "worker.log"
    until(lambda: log.exists() and "works" in log.read_text())


LAUNCHERS: list[LocalLauncher] = []


@pytest.fixture(autouse=True)
def _reap_shims() -> Iterator[None]:
    yield
    while LAUNCHERS:
        launcher = LAUNCHERS.pop()
        until(lambda launcher=launcher: (launcher._reap(), not launcher._shims)[1])  # type: ignore[misc]


def test_the_stop_goes_from_the_door_to_the_database(house: House) -> None:
    """Each group has ended before the next is asked, however long it takes."""
    house.add("postgres", SERVERS)
    house.add("valkey", SERVERS)
    house.add("controller", CONTROL, 0.1)
    house.add("shipper", SHIP, 0.3)
    house.add("web", WEB, 0.5)
    house.until_all_work()
    start_worker(house, 0.2)
    house.supervisor.stop()
    assert house.ended() == ["web", "shipper", "controller", "worker", "valkey", "postgres"]
    assert not house.layout.state_file.exists()


def test_a_second_signal_hurries_and_keeps_the_order(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "HURRY_S", 0.2)
    monkeypatch.setattr(module, "HURRY_S", 0.2)
    house.add("postgres", SERVERS)
    house.add("shipper", SHIP)
    web = house.add("web", WEB, 3600)
    house.until_all_work()
    start_worker(house, 3600)
    stopping = threading.Thread(target=house.supervisor.stop)
    stopping.start()
    until(lambda: "Stopping" in house.shown.getvalue())
    assert web.pid, "without a hurry its grace is a minute"
    house.supervisor.hurry.set()
    stopping.join(timeout=20)
    assert not stopping.is_alive()
    assert house.ended() == ["shipper", "postgres"]
    assert "web  did not end in time and was killed" in house.shown.getvalue()
    launcher = LocalLauncher(house.layout.workers)
    view = launcher.observe("r1")
    assert view is not None
    assert not view.alive


def test_a_server_that_does_not_end_is_told_otherwise_before_it_is_killed(layout: Layout) -> None:
    code = "import signal, sys; signal.signal(2, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    shown: list[str] = []
    program = Program(
        "postgres", [sys.executable, "-c", code], os.environ, "/", SERVERS, signal.SIGINT, signal.SIGQUIT, 0.1
    )
    child = Child(program, layout.logs / "postgres.log", 10_000, lambda _name, line: shown.append(line))
    child.start()
    until(lambda: "up" in shown)
    child.ask_to_stop()
    child.await_end(time.monotonic() + 0.1, threading.Event())
    assert child._process is not None
    assert child._process.returncode == -signal.SIGQUIT
    child.close()


def test_workers_end_even_when_nothing_else_runs(house: House) -> None:
    start_worker(house, 0)
    house.supervisor.stop()
    assert house.ended() == ["worker"]
    assert "Stopping" not in house.shown.getvalue()


def test_a_killed_child_comes_back_at_once_and_then_ever_later(house: House) -> None:
    child = house.add("web", WEB)
    pids = []
    for restarts in range(3):
        pids.append(child.pid)
        until(lambda restarts=restarts: child.restarts == restarts and child.pid)  # type: ignore[misc]
        os.kill(child.pid or 0, signal.SIGKILL)
        until(lambda restarts=restarts: (house.supervisor._tend(), child.restarts == restarts + 1)[1])  # type: ignore[misc]
    shown = house.shown.getvalue()
    for wait in ("0 s", "0.5 s", "1 s"):
        assert f"web ended: signal 9 (SIGKILL); starting it again in {wait}" in shown
    facts = json.loads(house.layout.state_file.read_text())["processes"]
    assert (facts[0]["name"], facts[0]["pid"], facts[0]["restarts"]) == ("web", child.pid, 3)


def test_a_child_that_cannot_be_forked_is_tried_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    child = house.add("web", WEB)
    start = child.start
    trouble = [OSError(11, "Resource temporarily unavailable")]

    def start_or_not() -> None:
        if trouble:
            raise trouble.pop()
        start()

    monkeypatch.setattr(child, "start", start_or_not)
    os.kill(child.pid or 0, signal.SIGKILL)
    until(lambda: (house.supervisor._tend(), child.restarts == 2 and child.pid)[1])
    assert "web could not be started: [Errno 11] Resource temporarily unavailable" in house.shown.getvalue()


def test_a_child_that_keeps_ending_fails_the_start_by_name(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_BACKOFF_S", (0.0,))
    house.add("shipper", SHIP, code="raise SystemExit(7)")
    with pytest.raises(CannotStartError, match=r"shipper ended: exit status 7, 6 times; see .*shipper\.log"):
        house.supervisor._await("the web process", lambda: False, 60)


def test_a_signal_while_starting_ends_the_start(house: House) -> None:
    house.supervisor._stopping.set()
    with pytest.raises(CannotStartError, match="Stopped while starting"):
        house.supervisor._fetched(5)


def test_a_full_disk_does_not_stop_the_watch(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    house.add("web", WEB)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", full)
        house.supervisor._tend()
    assert "No space left on device" in house.shown.getvalue()


def test_a_terminal_that_is_gone_stops_nothing(house: House) -> None:
    """`make up | head`: the children's pipes are read on, and the stop goes its way."""

    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    house.supervisor.terminal = Terminal(Gone())
    talks = "import signal, sys\nwhile True: print('x' * 5000, flush=True)"
    child = house.add("web", WEB, code=talks)
    log = house.layout.logs / "web.log"
    until(lambda: log.exists() and log.stat().st_size > 200_000)  # more than a pipe holds
    assert child.pid
    house.supervisor.stop()
    assert child.ended()


def test_a_log_goes_on_after_a_rotation_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RotatingFile(tmp_path / "web.log", 100)
    log.write("x" * 80 + "\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_args: (_ for _ in ()).throw(OSError(28, "full")))
        log.write("lost\n")
    log.write("kept\n")
    log.close()
    assert (tmp_path / "web.log").read_text() == "kept\n"


KILLED = """
import os, sys, time
from pathlib import Path
from console.supervisor.child import Child, Program
argv = [sys.executable, "-c", sys.argv[1], "child", sys.argv[2], "0"]
program = Program("web", argv, dict(os.environ), "/", 0)
child = Child(program, Path(sys.argv[3]), 9999, lambda _name, line: print(line, flush=True))
child.start()
print("pid", child.pid, flush=True)
time.sleep(60)
"""


def test_kill_9_of_the_supervisor_takes_its_children_along(tmp_path: Path) -> None:
    """The kernel sends the child its stop signal, so that it ends as it always does."""
    notes = tmp_path / "notes"
    argv = [sys.executable, "-c", KILLED, WORKS, str(notes), str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as supervisor:
        assert supervisor.stdout is not None
        lines = [supervisor.stdout.readline().split() for _ in range(2)]
        pid = int(next(words[1] for words in lines if words[0] == "pid"))
        ticks = process.start_ticks(pid)
        assert ticks is not None
        supervisor.kill()
    until(lambda: not process.is_alive(pid, ticks))
    assert notes.read_text() == "child "


# -- manage.py down ------------------------------------------------------------------------------------------------


def down(timeout: float = 20) -> str:
    said = io.StringIO()
    call_command("down", timeout=timeout, stdout=said)
    return said.getvalue()


def test_down_before_any_up_says_so(tmp_path: Path, settings: Any) -> None:
    settings.LAYOUT = Layout(tmp_path / "nothing")
    assert down() == "Fanlight is not running.\n"
    assert not (tmp_path / "nothing").exists()


def test_down_ends_the_children_and_workers_of_a_killed_supervisor(house: House) -> None:
    start_worker(house, 0)
    child = house.add("web", WEB)
    house.until_all_work()
    house.supervisor._write_state()
    said = down()
    assert "Ending what an earlier run left: web" in said
    assert sorted(house.ended()) == ["web", "worker"]
    assert child.ended()
    assert not house.layout.state_file.exists()


def test_down_waits_for_a_supervisor_that_has_not_said_its_pid(layout: Layout) -> None:
    with preflight.lock(layout), pytest.raises(CommandError, match="has not said its pid"):
        down(timeout=0.1)


def test_down_asks_once_and_waits(layout: Layout) -> None:
    code = (
        "import fcntl, json, signal, sys, time\n"
        "lock = open(sys.argv[1], 'a'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "asked = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "print('up', flush=True)\n"
        "while not asked: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "sys.exit(len(asked))\n"
    )
    argv = [sys.executable, "-c", code, str(layout.run / "supervisor.lock")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        facts = {"pid": supervisor.pid, "pid_ticks": process.start_ticks(supervisor.pid)}
        layout.state_file.write_text(json.dumps(facts))
        assert down() == "Fanlight is stopped.\n"
        assert supervisor.wait() == 1, "asked more than once: the second time would hurry it"


# -- first credentials ---------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_first_run_killed_before_the_banner_shows_its_credentials_the_next_time(layout: Layout) -> None:
    made = bootstrap.first_credentials(layout)
    assert User.objects.get(username="admin").check_password(made["password"])
    assert bootstrap.first_credentials(layout) == made
    bootstrap.forget_credentials(layout)
    assert bootstrap.first_credentials(layout) == {}


@pytest.mark.django_db
def test_credentials_of_a_transaction_that_never_was_are_made_anew(layout: Layout) -> None:
    """Killed between the file and the commit: what the file says opens nothing."""
    layout.credentials_file.write_text(json.dumps({"login": "admin", "password": "never", "api_key": "fl-never"}))
    made = bootstrap.first_credentials(layout)
    assert made["password"] != "never"
    assert User.objects.get(username="admin").check_password(made["password"])
    assert json.loads(layout.credentials_file.read_text()) == made


def test_a_banner_that_nobody_could_see_does_not_count_as_shown() -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    credentials = {"login": "admin", "password": "p", "api_key": "fl-k"}
    assert not Terminal(Gone()).banner("http://x", "m", credentials, "none yet")
    seen = io.StringIO()
    assert Terminal(seen).banner("http://x", "m", credentials, "none yet")
    assert "admin / p" in seen.getvalue()
