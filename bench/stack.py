"""A whole installation of its own, started and stopped through the same commands a person uses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL_FILE = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "smollm2-135m"


class StackError(Exception):
    """A command of the stack failed; the message is what it said."""


class Stack:
    """`up --detach` on a free port and a temporary data folder; everything is reached by commands and HTTP."""

    def __init__(self, **settings: str) -> None:
        self.data = Path(tempfile.mkdtemp(prefix="fl-stack-"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("FANLIGHT_", "DJANGO_"))}
        self.env = clean | {
            "FANLIGHT_DATA_DIR": str(self.data),
            "FANLIGHT_PORT": str(self.port),
            "HF_HUB_OFFLINE": "1",
            **{f"FANLIGHT_{name}": value for name, value in settings.items()},
        }
        if MODEL_FILE.exists():  # the checksum is checked all the same; only the download is saved
            (self.data / "models").mkdir()
            shutil.copy2(MODEL_FILE, self.data / "models" / MODEL_FILE.name)

    def manage(self, *argv: str, timeout: float = 300, stdin: str = "") -> str:
        """Run a management command; its output, or StackError with what it said."""
        result = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *argv],
            cwd=ROOT, env=self.env, input=stdin, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if result.returncode:
            raise StackError(f"manage.py {' '.join(argv)}: {result.stderr.strip() or result.stdout.strip()}")
        return result.stdout

    def up(self) -> str:
        return self.manage("up", "--detach")

    def down(self) -> str:
        return self.manage("down")

    def close(self) -> None:
        """Stop and forget everything."""
        with contextlib.suppress(StackError):
            self.down()
        servers = self.data / "servers.json"
        if servers.exists():
            shutil.rmtree(json.loads(servers.read_text())["servers"], ignore_errors=True)
        shutil.rmtree(self.data, ignore_errors=True)

    # -- what it says of itself ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return json.loads(self.manage("status", "--json"))

    def pid(self, name: str) -> int:
        """Pid of a supervised process, or of the first replica's worker for "worker"."""
        status = self.status()
        if name == "worker":
            return int(status["replicas"][0]["pid"])
        return int(next(each["pid"] for each in status["processes"] if each["name"] == name))

    def key(self, tenant: str = "default", **options: str) -> str:
        """A new key that the gateway knows already."""
        extra = [f"--{name}={value}" for name, value in options.items()]
        made = json.loads(self.manage("key", "create", "--tenant", tenant, "--json", *extra))
        request = urllib.request.Request(f"{self.url}/v1/models", headers={"authorization": f"Bearer {made['key']}"})

        def known() -> bool:
            with urllib.request.urlopen(request, timeout=5) as response:
                return response.status == 200

        eventually(known, 10, OSError)
        return str(made["key"])

    def usage(self, since: datetime) -> list[dict[str, Any]]:
        text = self.manage("usage", "--json", "--since", since.isoformat())
        return [json.loads(line) for line in text.splitlines()]

    def trace(self, request_id: str) -> dict[str, Any]:
        """RequestRecord and RequestDetail of a request, once the shipper has delivered it."""
        return eventually(lambda: json.loads(self.manage("request", request_id, "--json")), 10, StackError)

    def engine(self) -> dict[str, float]:
        """The worker's counters from its own metrics_url: plain names without labels, summed."""
        url = self.status()["replicas"][0]["metrics_url"]
        return scrape(url)

    def stats(self) -> dict[str, Any]:
        """The worker's /stats."""
        url = self.status()["replicas"][0]["metrics_url"].replace("/metrics", "/stats")
        return json.loads(get(url))

    def wait_ready(self, timeout_s: float = 60) -> dict[str, Any]:
        """Until a replica is ready."""

        def ready() -> dict[str, Any] | None:
            status = self.status()
            return status if any(each["state"] == "ready" for each in status["replicas"]) else None

        return eventually(ready, timeout_s)

    def wait_idle(self, timeout_s: float = 30) -> float:
        """Until the engine runs nothing and holds no block. Returns the seconds it took."""
        url = self.status()["replicas"][0]["metrics_url"].replace("/metrics", "/stats")
        started = time.monotonic()

        def idle() -> bool:
            stats = json.loads(get(url))
            return not stats["running"] and not stats["waiting"] and stats["free_blocks"] == stats["num_blocks"]

        eventually(idle, timeout_s, OSError, pause_s=0.02)
        return time.monotonic() - started

    def settled(self, since: datetime, count: int, timeout_s: float = 30) -> list[dict[str, Any]]:
        """The usage records since then, once there are at least `count`."""

        def enough() -> list[dict[str, Any]] | None:
            records = self.usage(since)
            return records if len(records) >= count else None

        return eventually(enough, timeout_s)

    def kill_everything(self) -> None:
        """kill -9 of every process of this installation, as a power cut would."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Pids whose command line or environment names this data folder (servers, workers and their shims included)."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and self._ours(pid)]

    def _ours(self, pid: int) -> bool:
        needle = str(self.data).encode()
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if needle in Path(f"/proc/{pid}/{name}").read_bytes():
                    return True
        return False


@contextlib.contextmanager
def running_stack(**settings: str) -> Iterator[Stack]:
    """A stack that is up and has a ready worker; gone afterwards."""
    stack = Stack(**settings)
    try:
        stack.up()
        stack.wait_ready()
        yield stack
    finally:
        stack.close()


def eventually(check: Callable[[], Any], timeout_s: float, *errors: type[BaseException], pause_s: float = 0.1) -> Any:
    """The first true result of `check`; the listed errors count as "not yet". TimeoutError with the last one."""
    deadline = time.monotonic() + timeout_s
    last: BaseException | None = None
    while True:
        try:
            result = check()
            if result:
                return result
        except errors as error:
            last = error
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s; last: {last}")
        time.sleep(pause_s)


def scrape(url: str) -> dict[str, float]:
    """Prometheus text to {name: sum over labels}."""
    totals: dict[str, float] = {}
    for line in get(url).splitlines():
        match = re.match(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)", line)
        if match:
            totals[match[1]] = totals.get(match[1], 0.0) + float(match[3])
    return totals


def get(url: str, timeout: float = 5) -> str:
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return response.read().decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def now() -> datetime:
    """A moment before any request that starts after the call (ids carry milliseconds)."""
    return datetime.now(UTC) - timedelta(milliseconds=2)
