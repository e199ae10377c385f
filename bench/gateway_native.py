"""The compiled load of bench/gateway.py: built when first needed, run on the core that is not the gateway's."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.stack import ROOT

SOURCES = ROOT / "bench" / "native"
BUILDS = ROOT / ".cache" / "bench"
FLAGS = ("-std=c++20", "-O2")
LOAD_CORE = "1"


class LoadError(Exception):
    """A load could not be run; the message is what it said."""


def built(name: str) -> Path:
    """The program of bench/native/NAME.cpp, compiled unless this very source was before."""
    text = b"".join(path.read_bytes() for path in (SOURCES / f"{name}.cpp", SOURCES / "http.hpp"))
    program = BUILDS / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}"
    if not program.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
            fresh = Path(folder) / name
            subprocess.run(["g++", *FLAGS, "-o", str(fresh), str(SOURCES / f"{name}.cpp")], check=True)
            fresh.rename(program)
    return program


def streams(port: int, model: str, key: str, count: int, tokens: int, interval_us: int) -> dict[str, Any]:
    """`count` paced streams, each read once: delays of tokens in ms, streams that were late, incomplete answers."""
    seconds = tokens * interval_us / 1e6
    return _load("sink", port, model, key, count, tokens, interval_us, 0, timeout_s=seconds + 60)


def answers(port: int, model: str, key: str, at_once: int, tokens: int, seconds: int) -> dict[str, Any]:
    """Streams one after the other on `at_once` connections: answers a second."""
    return _load("sink", port, model, key, at_once, tokens, 0, seconds, timeout_s=seconds + 60)


def latency(port: int, model: str, key: str, count: int) -> dict[str, Any]:
    """`count` requests, one after the other: p50 and p99 in ms."""
    return _load("probe", port, model, key, count, timeout_s=300)


def throughput(port: int, model: str, key: str, at_once: int, seconds: int) -> dict[str, Any]:
    """wrk with one thread: requests a second, and how many were not answered with a 2xx."""
    script = SOURCES / "post.lua"
    command = ["wrk", "-t1", f"-c{at_once}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script)]
    return _run([*command, f"http://127.0.0.1:{port}/v1/chat/completions", "--", model, key], seconds + 60)


def _load(name: str, *arguments: object, timeout_s: float) -> dict[str, Any]:
    return _run([str(built(name)), *map(str, arguments)], timeout_s)


def _run(command: list[str], timeout_s: float) -> dict[str, Any]:
    if not shutil.which(command[0]):
        raise LoadError(f"{command[0]} is not installed; bench/peers.sh installs it")
    command = ["taskset", "-c", LOAD_CORE, *command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        raise LoadError(f"{Path(command[3]).name}: {result.stderr.strip() or result.stdout.strip()}"[:1000])
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures
