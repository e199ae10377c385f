"""Metrics of all gateway processes of a host, whichever of them is asked.

Each process answers on a Unix socket with its own exposition and closes. Who is scraped asks the others and tells all
of them, every series with its process, so that a scraper sums over what it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

TIMEOUT_S = 1.0


class Siblings:
    """The metrics socket of this process, and the way to those of the others."""

    def __init__(self, folder: Path, instance: str, text: Callable[[], bytes]) -> None:
        self._folder = folder
        self._instance = instance
        self._text = text
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path()
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, self._short(path))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self._path().unlink(missing_ok=True)

    async def all_metrics(self) -> bytes:
        """The exposition of every process that answers; the sockets of dead ones are removed."""
        others = sorted(path for path in self._folder.glob("*.sock") if path != self._path())
        texts = await asyncio.gather(*(self._ask(path) for path in others))
        told = [(path.stem, text) for path, text in zip(others, texts, strict=True) if text]
        return merged([(self._instance, self._text()), *told])

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(self._text())
            await writer.drain()
        writer.close()

    async def _ask(self, path: Path) -> bytes:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._short(path))
                try:
                    return await reader.read(-1)
                finally:
                    writer.close()
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return b""
        except (OSError, TimeoutError):
            return b""

    def _path(self) -> Path:
        return self._folder / f"{self._instance}.sock"

    def _short(self, path: Path) -> str:
        """A Unix socket's path holds 107 bytes: relative to here it is shorter, where that helps."""
        relative = os.path.relpath(path)
        return min(str(path), relative, key=len)


def merged(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Several expositions as one: families together, each series labelled with its process."""
    families: dict[str, list[str]] = {}
    current = families.setdefault("", [])
    for process, text in texts:
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                known = name in families
                current = families.setdefault(name, [])
                if not known:
                    current.append(line)
            elif line.startswith("#"):
                if line not in current:
                    current.append(line)
            elif line:
                current.append(_labelled(line, process))
    return "\n".join(line for lines in families.values() for line in lines).encode() + b"\n"


def _labelled(line: str, process: str) -> str:
    name, brace, rest = line.partition("{")
    if brace:
        return f'{name}{{process="{process}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{process="{process}"}} {value}'
