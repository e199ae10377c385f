"""Before anything starts: a taken port, a full disk, a second supervisor, leftovers, a stale pid."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from console.base.layout import Layout
from console.supervisor import preflight
from console.supervisor.child import RotatingFile, readable
from console.supervisor.preflight import AlreadyRunningError, CannotStartError
from engine.launchers import process


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "data")
    made.create()
    return made


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotStartError, match=f"FANLIGHT_PORT={port + 1}"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


def test_a_full_disk_is_refused_with_the_folder(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 10, 5_000_000))
    with pytest.raises(CannotStartError, match="Only 5 MB are free"):
        preflight.check_disk(layout, 1_000_000_000)


def test_a_second_supervisor_is_told_about_the_first(layout: Layout) -> None:
    layout.state_file.write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": 1}))
    with preflight.lock(layout), pytest.raises(AlreadyRunningError) as caught:
        preflight.lock(layout)
    assert caught.value.facts["url"] == "http://127.0.0.1:1"


def test_leftovers_of_a_killed_supervisor_are_ended(layout: Layout) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    entry = {"name": "web", "pid": child.pid, "pid_ticks": process.start_ticks(child.pid)}
    layout.state_file.write_text(json.dumps({"processes": [entry]}))
    said: list[str] = []
    preflight.end_leftovers(layout, said.append)
    assert child.wait(timeout=10) != 0
    assert said == ["Ending what an earlier run left: web"]


def test_a_pid_that_was_given_away_is_left_alone(layout: Layout) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        ticks = process.start_ticks(child.pid)
        assert ticks is not None
        entry = {"name": "web", "pid": child.pid, "pid_ticks": ticks - 1}
        layout.state_file.write_text(json.dumps({"processes": [entry]}))
        preflight.end_leftovers(layout, pytest.fail)
        assert child.poll() is None
        child.kill()


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}"])
def test_a_damaged_state_file_counts_as_none(layout: Layout, text: str) -> None:
    layout.state_file.write_text(text)
    assert preflight.read_state(layout) == {}
    preflight.end_leftovers(layout, pytest.fail)


def test_a_stale_postmaster_pid_is_removed_and_a_live_one_kept(layout: Layout) -> None:
    layout.postgres_data.mkdir()
    pid_file = layout.postgres_data / "postmaster.pid"
    pid_file.write_text(f"{os.getpid()}\n")  # alive, and no postgres
    preflight.clean_stale_postmaster(layout)
    assert not pid_file.exists()
    preflight.clean_stale_postmaster(layout)


def test_logs_stay_within_their_bound(tmp_path: Path) -> None:
    log = RotatingFile(tmp_path / "web.log", 2000)
    for number in range(500):
        log.write(f"line {number}\n")
    log.close()
    kept = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert kept <= 2200
    assert "line 499" in (tmp_path / "web.log").read_text()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\n", "plain"),
        ('{"level": "INFO", "message": "up"}\n', "up"),
        ('{"level": "ERROR", "message": "no", "exc_info": "Trace"}', "ERROR no\nTrace"),
        ("{broken", "{broken"),
    ],
)
def test_json_lines_are_shown_as_a_person_reads_them(line: str, shown: str) -> None:
    assert readable(line) == shown
