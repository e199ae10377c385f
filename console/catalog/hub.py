"""`hf:` sources: out of the local hub cache, or from a mirror where one is named. Only files that may be served."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from console.base import egress
from console.catalog import pinned
from console.catalog.files import MOST_FILES
from console.catalog.sources import Progress, SourceError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WANTED = frozenset((".json", ".safetensors", ".gguf", ".jinja", ".model", ".txt", ".md", ""))
_UNWANTED = re.compile(r"(^|/)(original|onnx|openvino|coreml)/|\.(bin|pt|pth|h5|msgpack|onnx|ot)(\.index\.json)?$")


@dataclass(frozen=True)
class Hub:
    """Where models of Hugging Face's hub may be had here."""

    cache: Path  # of its own library: models--org--name/snapshots/<commit>/…
    mirror: str  # base URL; empty: none
    allow: egress.Allow


def find(hub: Hub, repo: str, revision: str) -> tuple[Path, str] | None:
    """A snapshot in the local cache and its commit; None where it is not there."""
    home = hub.cache / f"models--{repo.replace('/', '--')}"
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (home / "refs" / revision).read_text("ascii").strip()
        except (OSError, ValueError):
            return None
    snapshot = home / "snapshots" / commit
    return (snapshot, commit) if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def fetch(
    hub: Hub, repo: str, revision: str, folder: Path, say: Progress, percent: Callable[[int], None]
) -> tuple[Path, str]:
    """The folder of a model and the commit that it is; from the cache, else from the mirror. Raises SourceError."""
    cached = find(hub, repo, revision)
    if cached is not None:
        say(f"{repo} is in the hub cache")
        return cached
    if not hub.mirror:
        raise SourceError(
            f"{repo}@{revision} is not in the hub cache ({hub.cache}), and no mirror is named in FANLIGHT_HF_MIRROR. "
            f"Fetch it there with `hf download {repo} --revision {revision}`, or name a mirror."
        )
    try:
        return _from_mirror(hub, repo, revision, folder, say, percent)
    except (pinned.Unreachable, egress.EgressRefused) as error:
        raise SourceError(f"{repo}@{revision} could not be fetched: {error}.") from error


def _from_mirror(
    hub: Hub, repo: str, revision: str, folder: Path, say: Progress, percent: Callable[[int], None]
) -> tuple[Path, str]:
    about = pinned.get_json(f"{hub.mirror}/api/models/{repo}/revision/{quote(revision)}", hub.allow)
    commit = about.get("sha", "") if isinstance(about, dict) else ""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise SourceError(f"The mirror does not say which commit {repo}@{revision} is.")
    names = _names(about)
    say(f"Fetching {len(names)} files of {repo}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
        place = Path(temporary) / "files"
        for number, name in enumerate(names):
            url = f"{hub.mirror}/{repo}/resolve/{commit}/{quote(name)}"
            pinned.download(url, hub.allow, place / name, lambda _bytes: None)
            percent(100 * (number + 1) // len(names))
        shutil.rmtree(folder, ignore_errors=True)
        place.replace(folder)
    return folder, commit


def _names(about: Any) -> list[str]:
    """Files worth fetching: weights in a form that may be served, and what a tokenizer and config are."""
    listed = about.get("siblings", [])
    names = [entry.get("rfilename", "") for entry in listed if isinstance(entry, dict)]
    kept = [
        name
        for name in names
        if isinstance(name, str)
        and PurePosixPath(name).suffix in _WANTED
        and not _UNWANTED.search(name)
        and not PurePosixPath(name).is_absolute()
        and ".." not in PurePosixPath(name).parts
    ]
    if not any(name.endswith((".safetensors", ".gguf")) for name in kept):
        raise SourceError("It has no weights in safetensors or GGUF, and nothing else is taken.")
    if len(kept) > MOST_FILES:
        raise SourceError(f"The mirror lists {len(kept):,} files of it; at most {MOST_FILES:,} are taken.")
    return sorted(kept, key=lambda name: name.endswith((".safetensors", ".gguf")))
