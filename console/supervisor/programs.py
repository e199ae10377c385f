"""What the supervisor runs: each process of an installation with its command line, its place in the stop, its grace."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from console import embedded
from console.environment import ROOT
from console.supervisor.child import Program

# Stop order: streams drain and settle, the journal is shipped, then what starts workers, the workers, the servers.
WEB, SHIP, CONTROL, SERVERS = 0, 1, 2, 4
WEB_EXTRA_S = 15.0  # after the drain: requests are cut and settled (5 s), pages end (3 s)
_CELERY = ("-m", "celery", "--app", "console.celery", "--quiet")


def server(command: embedded.ServerCommand) -> Program:
    """An embedded server, as the user it runs as."""
    return Program(
        command.name,
        command.argv,
        command.env,
        "/",
        SERVERS,
        command.stop_signal,
        command.last_signal,
        grace_s=30,
        identity=embedded.run_as_server_user(),
    )


def web(drain_s: float) -> Program:
    """The gateway and the pages."""
    return _python("web", _manage("web"), WEB, drain_s + WEB_EXTRA_S)


def gateways(workers: int, drain_s: float) -> Program:
    """/v1 in processes of its own; stops with the web process."""
    argv = (*_manage("gateway"), "--workers", str(workers))
    return _python("gateway", argv, WEB, drain_s + 2 * WEB_EXTRA_S)


def shipper() -> Program:
    """Journals to PostgreSQL; its last round comes after the web process has ended."""
    return _python("shipper", _manage("shipper"), SHIP, 20)


def controller() -> Program:
    """Deployments to workers; waits for a deployment by itself."""
    return _python("controller", _manage("controller"), CONTROL, 15)


def jobs() -> Program:
    """Celery's worker, in threads."""
    pool = ("worker", "--pool", "threads", "--concurrency", "2", "--loglevel", "WARNING")
    quiet = ("--without-gossip", "--without-mingle", "--hostname", "jobs@%h")
    return _python("jobs", (*_CELERY, *pool, *quiet), CONTROL, 10)


def beat(schedule: Path) -> Program:
    """Celery's clock; `schedule` is its own file."""
    argv = (*_CELERY, "beat", "--loglevel", "WARNING", "--schedule", str(schedule), "--pidfile", "")
    return _python("beat", argv, CONTROL, 10)


def _manage(command: str) -> Sequence[str]:
    return (str(ROOT / "manage.py"), command)


def _python(name: str, argv: Sequence[str], group: int, grace_s: float) -> Program:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "DJANGO_SETTINGS_MODULE": "console.settings"}
    return Program(name, (sys.executable, *argv), env, str(ROOT), group, grace_s=grace_s)
