"""A real engine in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

ROOT = Path(__file__).resolve().parents[2]
NAME = "smol"


@dataclass
class Served:
    """A running engine and ways to look at it."""

    process: subprocess.Popen[bytes]
    facts: dict[str, Any]
    log: Path
    api: openai.OpenAI

    @property
    def url(self) -> str:
        return str(self.facts["introspection_url"])

    def stats(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/stats").json())

    def wait_for(self, check: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> dict[str, Any]:
        """Poll /stats until `check` holds; the bound only turns a hang into a failure."""
        end = time.monotonic() + seconds
        while not check(stats := self.stats()):
            assert time.monotonic() < end, f"still not so: {stats}"
            time.sleep(0.01)
        return stats

    def wait_for_log(self, word: str) -> None:
        """Poll the log until a word is in it."""
        end = time.monotonic() + 60
        while word not in self.log.read_text():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def wait_idle(self) -> dict[str, Any]:
        stats = self.wait_for(lambda s: s["running"] == 0 and s["waiting"] == 0)
        assert stats["free_blocks"] == stats["num_blocks"]
        return stats


@contextlib.contextmanager
def serve(model: Path, folder: Path, *options: str, uds: bool = False) -> Iterator[Served]:
    """Start an engine, wait until it is ready, and end it."""
    ready, log = folder / "ready.json", folder / "engine.log"
    place = ["--uds", str(folder / "s"), "--introspection-port", "0"] if uds else ["--port", "0"]
    command = [sys.executable, "-m", "engine", "serve", "--model", str(model)]
    command += ["--served-model-name", NAME, "--ready-file", str(ready), *place, *options]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink, env=os.environ)
    try:
        end = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        facts = json.loads(ready.read_text())
        url = f"{facts['introspection_url']}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api:
            yield Served(process, facts, log, api)
    finally:
        process.kill()
        process.wait()
