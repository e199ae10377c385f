"""Workers as processes of this machine, each below a shim, each with a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine.launchers import process
from engine.launchers.base import Launch, WorkerView

MARK = "WORKER_OF_REPLICA"
"""In the environment of a shim, its worker and all that comes of it: so they are found, whoever their parent is."""


class LocalLauncher:
    """Launcher for one host. Everything it knows is in `root/<replica id>/`, so a new controller sees the same."""

    def __init__(self, root: Path, guardian: Path | None = None) -> None:
        self.root = root
        self.guardian = guardian
        self._shims: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()  # `end` may run in a thread of its own

    def folder(self, replica_id: str) -> Path:
        """Folder of a replica's worker: worker.json, ready.json, exit.json, worker.log."""
        return self.root / replica_id

    def ready_file(self, replica_id: str) -> Path:
        """Where the worker says that it is ready."""
        return self.folder(replica_id) / "ready.json"

    def log_file(self, replica_id: str) -> Path:
        """What the worker wrote; of bounded size, the part before it in worker.log.1."""
        return self.folder(replica_id) / "worker.log"

    def launch(self, launch: Launch) -> None:
        """Start a worker under a shim in a session of its own. Any worker of an earlier epoch must have ended."""
        folder = self.folder(launch.replica_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep(launch.replica_id)
        for name in ("worker.json", "ready.json", "exit.json"):
            (folder / name).unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "engine.launchers.shim",
            "--folder",
            str(folder),
            "--epoch",
            str(launch.epoch),
        ]
        if self.guardian is not None:
            command += ["--guardian", str(self.guardian)]
        if launch.cores:
            command += ["--cores", ",".join(map(str, launch.cores))]
        with (folder / "shim.log").open("wb") as log:
            shim = subprocess.Popen(
                [*command, "--", *launch.argv],
                env={**launch.env, MARK: launch.replica_id},
                cwd=launch.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        with self._lock:
            self._shims.append(shim)

    def observe(self, replica_id: str) -> WorkerView | None:
        """What is known of the replica's newest worker; None when none was ever started."""
        self._reap()
        folder = self.folder(replica_id)
        worker = _read(folder / "worker.json")
        if worker is None:
            return None
        alive = process.is_alive(worker["pid"], worker["pid_ticks"])
        ended = None if alive else self._exit_of(worker, folder)
        reason = "" if alive else (ended or {}).get("reason", "ended together with its shim")
        return WorkerView(
            epoch=worker["epoch"],
            pid=worker["pid"],
            pid_ticks=worker["pid_ticks"],
            alive=alive,
            exit_reason=reason,
            ready=_read(folder / "ready.json") or {},
        )

    def end(self, replica_id: str, grace_s: float) -> None:
        """Ask the worker to drain and end; kill it after `grace_s`. Returns when it is gone."""
        worker = _read(self.folder(replica_id) / "worker.json")
        if worker is None:
            return
        process.signal_if_same(worker["pid"], worker["pid_ticks"], signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.is_alive(worker["pid"], worker["pid_ticks"]):
            if time.monotonic() > deadline:
                self.kill(replica_id)
                return
            time.sleep(0.02)
        self._await_shim(worker)

    def kill(self, replica_id: str) -> None:
        """End the worker at once, whatever it is doing."""
        worker = _read(self.folder(replica_id) / "worker.json")
        if worker is None:
            return
        process.signal_if_same(worker["pid"], worker["pid_ticks"], signal.SIGKILL)
        self._await_shim(worker)
        self._sweep(replica_id)

    def family(self, replica_id: str) -> list[int]:
        """Pids of the replica's live worker and its descendants, the worker first; empty without one."""
        worker = _read(self.folder(replica_id) / "worker.json")
        if worker is None or not process.is_alive(worker["pid"], worker["pid_ticks"]):
            return []
        return process.tree(worker["pid"])

    def known(self) -> list[str]:
        """Ids of replicas that have, or had, a worker here."""
        return [folder.name for folder in self.root.iterdir() if (folder / "worker.json").exists()]

    @staticmethod
    def _sweep(replica_id: str) -> None:
        """End whatever of a replica's earlier workers is still there, even where its shim was killed too."""
        for pid in process.marked(f"{MARK}={replica_id}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _exit_of(worker: dict[str, Any], folder: Path) -> dict[str, Any] | None:
        """How the worker ended. Its shim writes that a moment after the death; a dead shim never will."""
        deadline = time.monotonic() + 1
        while True:
            shim_alive = process.is_alive(worker["shim_pid"], worker["shim_ticks"])
            ended = _read(folder / "exit.json")
            if ended is not None or not shim_alive or time.monotonic() > deadline:
                return ended
            time.sleep(0.01)

    def _await_shim(self, worker: dict[str, Any]) -> None:
        """The shim ends by itself after its worker and its family; give it a moment, then end it too."""
        deadline = time.monotonic() + 5
        while process.is_alive(worker["shim_pid"], worker["shim_ticks"]):
            if time.monotonic() > deadline:
                process.signal_if_same(worker["shim_pid"], worker["shim_ticks"], signal.SIGKILL)
            self._reap()
            time.sleep(0.02)

    def _reap(self) -> None:
        """Shims are our children for as long as we live; collect the ended ones so that no zombie is left."""
        with self._lock:
            self._shims = [shim for shim in self._shims if shim.poll() is None]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return facts
