"""What a model's files are, by their first bytes: weights that cannot run code, and nothing that could.

Pure apart from reading. Weights are safetensors or GGUF, for every engine; no setting changes that.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

HEADER_BYTES = 100 << 20  # of a safetensors file at most, as its own library has it
CONFIG_BYTES = 32 << 20  # of a config that is read whole; the largest real ones have a few
MOST_FILES = 5_000
_HARMLESS = frozenset(
    ("", ".json", ".jsonl", ".txt", ".md", ".jinja", ".model", ".tiktoken", ".vocab", ".merges", ".yaml", ".yml")
)
_IGNORED = frozenset((".gitattributes", ".gitignore", ".complete", ".cache"))
_PICTURES = frozenset((".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf"))


class RefusedFiles(Exception):
    """It is not what may be served; the message says which file and why."""

    def __init__(self, message: str, files: Sequence[Found] = ()) -> None:
        super().__init__(message)
        self.files = tuple(files)


@dataclass(frozen=True)
class Found:
    """One file, what it was recognised as, and why it is refused; empty: it is not."""

    name: str
    size: int
    kind: str
    refusal: str = ""

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {"name": self.name, "size": self.size, "kind": self.kind, "refusal": self.refusal}


@dataclass(frozen=True)
class Inspected:
    """A model that may be served: `path` is what an engine is given, a GGUF file or a folder."""

    path: Path
    format: str
    weights: tuple[Path, ...]
    files: tuple[Found, ...]


def within(path: Path, roots: Sequence[Path]) -> Path:
    """The real path, if it is in one of the roots. Raises RefusedFiles."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise RefusedFiles(f"There is nothing to read at {path}: {why}.") from error
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        named = ", ".join(map(str, roots)) or "none"
        raise RefusedFiles(f"{path} is outside the folders that models may be taken from ({named}).")
    return real


def inspect(path: Path, roots: Sequence[Path]) -> Inspected:
    """Look at a GGUF file or a model's folder. Raises RefusedFiles naming the first file that may not be there."""
    real = within(path, roots)
    found = [_recognise(real, real.name, roots)] if real.is_file() else _look_into(real, roots)
    refused = next((file for file in found if file.refusal), None)
    if refused is not None:
        raise RefusedFiles(f"{refused.name}: {refused.refusal}", found)
    ggufs = [file for file in found if file.kind == "gguf"]
    tensors = [file for file in found if file.kind == "safetensors"]
    base = real.parent if real.is_file() else real
    if len(ggufs) == 1 and not tensors:
        return Inspected(base / ggufs[0].name, "gguf", (base / ggufs[0].name,), tuple(found))
    if ggufs:
        raise RefusedFiles(f"There are {len(ggufs) + len(tensors)} weights files in it: name one GGUF file.", found)
    if not tensors:
        raise RefusedFiles("It holds no weights: neither safetensors nor GGUF.", found)
    if not real.is_dir() or not (real / "config.json").is_file():
        raise RefusedFiles("Safetensors need their folder with its config.json.", found)
    _refuse_remote_code(real, found)
    return Inspected(real, "safetensors", tuple(base / file.name for file in tensors), tuple(found))


def digest(inspected: Inspected, seen: Callable[[int], None] = lambda _bytes: None) -> str:
    """SHA-256: of a GGUF file its own; of a folder that of a list of every file's name and SHA-256.

    Args:
        seen: told how many bytes were read; what it raises ends the reading.
    """
    if inspected.format == "gguf":
        return sha256(inspected.path, seen)
    whole = hashlib.sha256()
    for file in sorted(inspected.files, key=lambda each: each.name):
        if file.kind != "ignored":
            whole.update(f"{file.name}\0{sha256(inspected.path / file.name, seen)}\n".encode())
    return whole.hexdigest()


def sha256(path: Path, seen: Callable[[int], None] = lambda _bytes: None) -> str:
    """SHA-256 of a file in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(8 << 20):
            found.update(part)
            seen(len(part))
    return found.hexdigest()


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensors by name. Raises ValueError for what is none, or not whole."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_BYTES:
            raise ValueError(f"its header would have {length / 1e6:,.0f} MB, and at most {HEADER_BYTES >> 20} are read")
        if length < 2:
            raise ValueError("its header has no possible length")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    try:
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError("its header names a tensor without its place") from error
    missing = 8 + length + max(ends, default=0) - path.stat().st_size
    if missing > 0:
        raise ValueError(f"{missing} bytes of it are missing")
    return header


def _look_into(folder: Path, roots: Sequence[Path]) -> list[Found]:
    found: list[Found] = []
    listed = list(islice(folder.rglob("*"), MOST_FILES + 1))
    if len(listed) > MOST_FILES:
        raise RefusedFiles(f"There are more than {MOST_FILES:,} files and folders in it.")
    for path in sorted(listed):
        name = str(path.relative_to(folder))
        if not name.isprintable():
            shown = name.encode("utf-8", "backslashreplace").decode()
            raise RefusedFiles(f"A file's name holds bytes that are no text: {shown[:200]}.", found)
        if path.is_dir() and not path.is_symlink():
            continue
        found.append(_recognise(path, name, roots))
    return found


def _recognise(path: Path, name: str, roots: Sequence[Path]) -> Found:
    """One file by where it is, its first bytes and its name."""
    try:
        real = within(path, roots)
        facts = real.stat()
    except RefusedFiles as refusal:
        return Found(name, 0, "link", f"it leads outside. {refusal}")
    if not stat.S_ISREG(facts.st_mode):
        return Found(name, 0, "special", "it is no ordinary file")
    if any(part in _IGNORED for part in Path(name).parts):
        return Found(name, facts.st_size, "ignored")
    with real.open("rb") as file:
        start = file.read(16)
    return Found(name, facts.st_size, *_kind(real, Path(name), start))


def _kind(path: Path, name: Path, start: bytes) -> tuple[str, str]:
    """What a file is, and why it is refused."""
    suffix = name.suffix.lower()
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and suffix not in (".safetensors", ".gguf"):
        return "pickle", "its weights are a pickle, which can run any code when it is loaded"
    if start[:4] == b"PK\x03\x04":
        return "zip with pickle", "a zip file, as torch packs pickles, which can run any code when they are loaded"
    if suffix == ".gguf":
        return ("gguf", "") if start[:4] == b"GGUF" else ("unknown", "it does not begin as a GGUF file does")
    if suffix == ".safetensors":
        try:
            read_header(path)
        except (OSError, ValueError, RecursionError) as error:
            return "unknown", f"it is no whole safetensors file: {error}"
        return "safetensors", ""
    if suffix == ".py":
        return "code", "code that comes with a model is never run, so it may not come with one"
    if suffix in _PICTURES:
        return "picture", ""
    if suffix in _HARMLESS:
        return "text", ""
    return suffix.lstrip("."), "weights are safetensors or GGUF, and this is neither"


def _refuse_remote_code(folder: Path, found: Sequence[Found]) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        try:
            if (folder / name).stat().st_size > CONFIG_BYTES:
                raise RefusedFiles(f"{name} has more than {CONFIG_BYTES >> 20} MB.", found)
            config = json.loads((folder / name).read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise RefusedFiles(f"{name} cannot be read: {error}", found) from error
        if isinstance(config, dict) and config.get("auto_map"):
            raise RefusedFiles(f"{name} asks for code of its own (auto_map), which is never run.", found)
