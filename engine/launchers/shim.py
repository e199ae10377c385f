"""A small parent for one worker: `python -m engine.launchers.shim --folder F --epoch N -- command …`

It leads a session of its own, so that neither Ctrl-C nor the controller's death reaches the worker. It records the
worker's pid and start time in worker.json and how it ended in exit.json, keeps its output in a bounded log, passes
SIGTERM on, and ends the worker when nobody has been watching for a while (the supervisor is gone for good). What the
worker leaves behind becomes the shim's and is ended with it: an engine's helper process may hold a card's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from engine.launchers import process

LOG_BYTES = 5_000_000  # kept twice: worker.log and worker.log.1
ORPHAN_S = 60.0


def main() -> int:
    """Run one worker to its end. Returns 0; the worker's own end is in exit.json."""
    options = _options()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    process.adopt_orphans()
    worker = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: _prepare(options.cores),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: worker.send_signal(signal.SIGTERM))
    _say_who(options.folder, options.epoch, worker.pid)
    assert worker.stdout is not None
    log = threading.Thread(target=_keep_log, args=(worker.stdout, options.folder / "worker.log"), daemon=True)
    log.start()
    _wait(worker, options.guardian)
    log.join(timeout=0.2)
    reason = process.describe_exit(worker.returncode)
    _write(options.folder / "exit.json", {"epoch": options.epoch, "reason": reason, "at": time.time()})
    _end_family()
    return 0


def _prepare(cores: list[int]) -> None:
    """In the worker, before its program: it dies with the shim, keeps to its cores, and its stacks may be read."""
    process.die_with_parent(signal.SIGKILL)
    process.let_others_look()
    if cores:
        with contextlib.suppress(OSError):  # a core was taken away meanwhile: better elsewhere than not at all
            os.sched_setaffinity(0, cores)


def _end_family() -> None:
    """End what the worker left behind."""
    while family := process.tree(os.getpid())[1:]:
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.launchers.shim")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--guardian", type=Path, help="file naming the supervisor's pid and start time")
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")], default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _say_who(folder: Path, epoch: int, pid: int) -> None:
    """Record both processes by pid and start time."""
    facts = {"epoch": epoch, "pid": pid, "pid_ticks": process.start_ticks(pid) or 0}  # 0: ended already
    shim = {"shim_pid": os.getpid(), "shim_ticks": process.start_ticks(os.getpid())}
    _write(folder / "worker.json", {**facts, **shim})


def _wait(worker: subprocess.Popen[bytes], guardian: Path | None) -> None:
    """Until the worker ends, or nobody has guarded it for ORPHAN_S."""
    orphaned_at: float | None = None
    while True:
        try:
            worker.wait(timeout=2)
            return
        except subprocess.TimeoutExpired:
            if guardian is None or _guarded(guardian):
                orphaned_at = None
            elif orphaned_at is None:
                orphaned_at = time.monotonic()
            elif time.monotonic() - orphaned_at > ORPHAN_S:
                _end(worker)
                return


def _guarded(guardian: Path) -> bool:
    try:
        facts = json.loads(guardian.read_text())
        return process.is_alive(facts["pid"], facts["pid_ticks"])
    except (OSError, ValueError, KeyError):
        return False


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(timeout=30)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def _keep_log(stream: IO[bytes], path: Path) -> None:
    """Copy the worker's output to a log of bounded size: the newest LOG_BYTES and the file before it."""
    file = path.open("ab")
    try:
        for line in stream:
            if file.tell() > LOG_BYTES:
                file.close()
                path.replace(path.with_name(path.name + ".1"))
                file = path.open("ab")
            file.write(line)
            file.flush()
    finally:
        file.close()


def _write(path: Path, facts: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(facts))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
