"""What workers wrote: the last word of one that died, and a search over what is kept of a replica's log."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from django.conf import settings

LONGEST_LINE = 2_000
MOST_LINES = 2_000


@dataclass(frozen=True)
class Line:
    """One line of a log. `number` counts from the oldest line that is kept."""

    number: int
    text: str


@dataclass(frozen=True)
class Found:
    """The newest lines that match, oldest first; `total` matched among the `searched` lines that are kept."""

    lines: tuple[Line, ...]
    total: int
    searched: int


def search_log(replica_id: UUID, text: str = "", limit: int = 200) -> Found:
    """Search a replica's log, the part before the newest included; the case of letters does not matter.

    The log is a ring of two files (engine.launchers.shim), so that a search reads at most ten megabytes. Without `text`
    it is the log's end. Control characters are left out.
    """
    wanted, total, number = text.casefold(), 0, 0
    newest: deque[Line] = deque(maxlen=max(1, min(limit, MOST_LINES)))
    for number, line in enumerate(_lines(settings.LAYOUT.workers / str(replica_id)), 1):
        if wanted in line.casefold():
            total += 1
            newest.append(Line(number, line))
    return Found(tuple(newest), total, number)


def last_line(path: Path) -> str:
    """The last line of a worker's log, for the reason of its death."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            start = max(0, file.tell() - 4096)
            file.seek(start)
            whole = file.read().decode(errors="replace").splitlines()[1 if start else 0 :]
            lines = [line for line in whole if _tells_why(line)]
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""


def _lines(folder: Path) -> Iterator[str]:
    for name in ("worker.log.1", "worker.log"):
        try:
            with (folder / name).open("rb") as file:
                for line in file:
                    yield _printable(line[:LONGEST_LINE].decode(errors="replace").rstrip())
        except OSError:
            continue


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\t" else "·" for letter in text)


def _tells_why(line: str) -> bool:
    """Not the engine's own records of its progress: the last of them says only how far it had come."""
    return bool(line.strip()) and not line.startswith('{"event": ')
