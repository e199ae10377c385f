"""Where files go: reachability under root, short sockets, atomic writes."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from console.base import layout
from console.base.layout import Layout, reachable, write_atomically

ROOT = Path(__file__).resolve().parent.parent.parent
NOBODY = pwd.getpwnam("nobody")


def test_a_folder_below_a_private_one_is_out_of_reach(tmp_path: Path) -> None:
    private = tmp_path / "private"
    inner = private / "inner"
    inner.mkdir(parents=True)
    tmp_path.chmod(0o755)
    private.chmod(0o700)
    inner.chmod(0o755)
    assert not reachable(inner, NOBODY)
    private.chmod(0o711)
    assert reachable(inner, NOBODY) == all(parent.stat().st_mode & 0o001 for parent in tmp_path.parents)


def test_the_place_of_the_servers_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Layout(tmp_path / "data")
    monkeypatch.setattr(layout, "reachable", lambda _path, _user: True)
    first.create()
    monkeypatch.setattr(layout, "reachable", lambda _path, _user: False)
    assert Layout(tmp_path / "data").servers == first.servers


def test_a_clone_out_of_reach_sends_the_servers_elsewhere_under_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(layout, "reachable", lambda _path, _user: False)
    assert Layout(tmp_path / "data").servers.parent == Path("/var/lib/fanlight")


def test_sockets_fit_an_address_however_deep_the_clone_is(tmp_path: Path) -> None:
    deep = Layout(tmp_path / ("x" * 90) / "data")
    assert len(os.fsencode(deep.sockets / ".s.PGSQL.5432.lock")) < 108
    assert len(os.fsencode(deep.worker_sockets / "0123456789-1000.sock")) < 108
    assert deep.sockets != Layout(tmp_path / ("y" * 90) / "data").sockets


def test_everything_made_is_private(tmp_path: Path) -> None:
    made = Layout(tmp_path / "data")
    made.create()
    made.create()
    for folder in (
        made.journal,
        made.models,
        made.logs,
        made.run,
        made.workers,
        made.sockets,
        made.worker_sockets,
    ):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_lost_secret_is_not_replaced_behind_everyones_back(tmp_path: Path) -> None:
    used = Layout(tmp_path / "data")
    used.create()
    answer = subprocess.run(
        [sys.executable, "manage.py", "check"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "FANLIGHT_DATA_DIR": str(used.data)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode != 0
    assert "secret.key is missing" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not used.secret_file.exists()


def test_an_interrupted_write_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "state.json"
    write_atomically(target, "old")

    def fail(_handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_socket_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Below /tmp anybody can put one there first: root would give its target away."""
    made = Layout(tmp_path / "d")
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    made.worker_sockets.parent.mkdir(parents=True)
    made.worker_sockets.symlink_to(victim)
    with pytest.raises(PermissionError, match="is a link"):
        made.create()
    assert victim.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_socket_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    made = Layout(tmp_path / "d")
    made.worker_sockets.mkdir(parents=True)
    os.chown(made.worker_sockets, 12345, 12345)
    with pytest.raises(PermissionError, match="another user"):
        made.create()
