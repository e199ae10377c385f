"""SHA-256 of weight files, where somebody said what it has to be."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from engine.errors import ConfigError, WrongChecksum

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64})(?:\s+\*?(.+?))?\s*")


def verify_checksums(model: Path, told: str | None) -> list[str]:
    """Compare files with `told` and with the lists beside them; the names of those that were compared.

    Lists are `SHA256SUMS` in the folder and `FILE.sha256`, as sha256sum writes them. Raises WrongChecksum.
    """
    if told is not None and model.is_dir():
        raise ConfigError(f"A checksum is that of a file, and {model} is a folder: put a {SUMS} into it.")
    wanted = _listed(model)
    if told is not None:
        wanted.append((model, told, "the setting model_sha256"))
    for path, digest, source in wanted:
        if not path.is_file():
            raise WrongChecksum(f"{path.name} is missing; {source} lists it.")
        found = sha256(path)
        if found != digest.lower():
            raise WrongChecksum(
                f"{path.name} is damaged or another file: its SHA-256 is {found}, not that of {source}."
            )
    return sorted({path.name for path, _, _ in wanted})


def sha256(path: Path) -> str:
    """The file's digest in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed(model: Path) -> list[tuple[Path, str, str]]:
    """File, digest and the list's name. Of a folder every line counts, of a file its own."""
    folder = model if model.is_dir() else model.parent
    lists = [folder / SUMS, *(sorted(folder.glob("*.sha256")) if model.is_dir() else [Path(f"{model}.sha256")])]
    found = []
    for path in filter(Path.is_file, lists):
        for name, digest in _read(path):
            target = folder / (name or path.name.removesuffix(".sha256"))
            if model.is_dir() or target == model:
                found.append((target, digest, path.name))
    return found


def _read(path: Path) -> list[tuple[str | None, str]]:
    """Names and digests, as sha256sum writes them, or a digest alone."""
    entries = []
    for line in path.read_text("utf-8").splitlines():
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise WrongChecksum(f"{path.name} has a line that is no checksum: {line[:80]!r}.")
        digest, name = matched.groups()
        if name is not None:
            name = name.removeprefix("./")
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise WrongChecksum(f"{path.name} names a file outside its folder: {name!r}.")
        entries.append((name, digest))
    return entries
