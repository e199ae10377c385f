"""The parts of bench/engine.py that only our engine takes: cold start, memory, coming back from a swap."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.engine_calm import Calm
from bench.engine_load import Ask, drive, words
from bench.engine_servers import Server, contenders
from bench.stack import MODEL_FILE, ROOT

POOL_TO_FILL = 1024  # blocks; the default pool would take minutes to write


@dataclass(frozen=True)
class Check:
    """One figure of ours, and what it must be at most or at least."""

    case: str
    what: str
    server: str
    precision: str
    value: float | None
    unit: str
    bar: float | None = None
    at_most: bool = True

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "NOT RUN"
        if self.bar is None:
            return ""
        return "pass" if (self.value <= self.bar if self.at_most else self.value >= self.bar) else "FAIL"


def cold_start(logs: Path, rounds: int, calm: Calm) -> list[Check]:
    """Seconds from the spawn to the first streamed token; with an empty cache the fused library is compiled first."""
    first_token(logs)  # builds the library if the sources changed, and is not counted
    runs = [calm.measured(partial(first_token, logs)) for _ in range(rounds)]
    with tempfile.TemporaryDirectory(prefix="fl-native-") as empty:
        building, label = first_token(logs, FANLIGHT_NATIVE_CACHE=empty)
    usual = statistics.median(seconds for (seconds, _), _ in runs)
    others = statistics.median(others for _, others in runs)
    what = f"first token, library built (others had {others:.0%} of the cores)"
    return [
        Check("cold-start", what, "ours", runs[0][0][1], usual, "s", 10.0),
        Check("cold-start", "first token, library compiled at this start", "ours", label, building, "s"),
    ]


def first_token(logs: Path, **env: str) -> tuple[float, str]:
    """Start an engine whose model has to be read from the disk, and ask at once. Seconds, and what it serves with."""
    forget(MODEL_FILE)
    began = time.perf_counter()
    server = Server(contenders()["ours"], 1, 0, logs / "cold.log", env)
    try:
        while True:
            try:
                (reply,) = drive(server.port, [Ask(words(began, 16), 4)], 1)
                break
            except ConnectionRefusedError:
                server.check_alive()
                time.sleep(0.01)
        server.wait_ready()
        return reply.arrivals[0] - began, server.precision
    finally:
        server.stop()


def forget(path: Path) -> None:
    """Drop a file from the page cache, as far as nobody has it mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory(logs: Path, _rounds: int, _calm: Calm) -> list[Check]:
    """Resident memory without weights and KV pool: after loading, and after every block of a pool was written."""
    checks = []
    for name, what in (("ours", "after loading"), ("ours-pool-1024", "all of the KV pool written")):
        server = Server(contenders()[name], 1, 0, logs / "memory.log")
        try:
            server.wait_ready()
            facts = server.facts()
            pool = facts["kv_bytes"] if name != "ours" else 0
            if pool:
                fill(server.port, facts["num_blocks"] * facts["block_size"])
            over = (server.get("/stats")["rss_bytes"] - facts["weights_bytes"] - pool) / 1e6
            parts = "RSS − weights − KV pool" if pool else "RSS − weights (the pool is not touched yet)"
            checks.append(Check("memory", f"{what}: {parts}", "ours", server.precision, over, "MB", 600.0))
            if not pool:
                literal = over - facts["kv_bytes"] / 1e6
                text = f"{what}: RSS − weights − KV pool"
                checks.append(Check("memory", text, "ours", server.precision, literal, "MB", 600.0))
        finally:
            server.stop()
    return checks


def fill(port: int, tokens: int, prompt: int = 2000) -> None:
    """Compute prompts until every block of a pool has been used: free ones come before those that are cached."""
    asks = [Ask(words((port, at), prompt), 4) for at in range(tokens // prompt + 2)]
    drive(port, asks, 2)


def swap_resume(_logs: Path, rounds: int, _calm: Calm) -> list[Check]:
    """What bench/engine_swap.py finds, in a process of its own."""
    command = [sys.executable, str(ROOT / "bench" / "engine_swap.py"), "--json", "--rounds", str(max(rounds, 3))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"engine_swap.py: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout)
    path = found["path"]
    return [
        Check("swap", "a sequence of 1,000 tokens, resumed from the host", "in process", path, found["swap_ms"], "ms"),
        Check("swap", "the same, computed again", "in process", path, found["recompute_ms"], "ms"),
        Check("swap", "resumed ÷ computed again", "in process", path, found["ratio"], "×", 0.2),
    ]


ALONE: dict[str, Callable[[Path, int, Calm], list[Check]]] = {
    "cold-start": cold_start,
    "memory": memory,
    "swap": swap_resume,
}
