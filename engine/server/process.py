"""The serving process: sockets, signals, the ready file, and a drain that ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from engine.boot import Engine, build
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.server.app import App, EngineApp
from engine.server.service import Service


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen and how to stop; the engine's own settings are in EngineConfig."""

    host: str = "127.0.0.1"
    port: int = 8001
    uds: Path | None = None
    introspection_port: int | None = None
    api_key_file: Path | None = None
    ready_file: Path | None = None
    drain_seconds: float = 30.0
    log_json: bool = False

    def api_key(self) -> str | None:
        """The key clients must show. Raises ConfigError."""
        if self.api_key_file is None:
            return None
        try:
            key = self.api_key_file.read_text("utf-8").strip()
        except OSError as error:
            raise ConfigError(f"The API key file cannot be read: {error}") from error
        if not key:
            raise ConfigError(f"The API key file {self.api_key_file} is empty.")
        return key


class Log:
    """One line per event on stderr, as JSON or for people."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json

    def __call__(self, event: str, **facts: Any) -> None:
        if self._json:
            line = json.dumps({"event": event, "time": time.time(), **facts})
        else:
            line = " ".join([event, *(f"{name}={value}" for name, value in facts.items())])
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: this process has two servers and one drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def run(config: EngineConfig, server: ServerConfig) -> int:
    """Load, listen, serve until told to stop; returns the exit status."""
    log = Log(as_json=server.log_json)
    key = server.api_key()
    listener = open_listener(server)
    engine = build(config, lambda done: log("loading", done=round(done, 3)))
    log("loaded", **engine.facts())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(engine, server, listener, key, log))


async def _serve(
    engine: Engine, server: ServerConfig, listener: socket.socket, key: str | None, log: Log
) -> int:
    service = Service(
        engine.config,
        engine.tokenizer,
        engine.scheduler,
        engine.runner,
        engine.max_model_len,
        engine.vocab_size,
        key,
    )
    service.core.start()
    main = _server(EngineApp(service), server.drain_seconds)
    tasks = [asyncio.create_task(main.serve([listener]))]
    side = _open_side(server)
    side_server = _server(EngineApp(service, inference=False), 1.0)
    if side is not None:
        tasks.append(asyncio.create_task(side_server.serve([side])))
    _on_signals(service, main, server.drain_seconds, log)
    await _started(main, tasks[0])
    facts = {"pid": os.getpid(), **_addresses(server, listener, side), **engine.facts()}
    if server.ready_file is not None:
        write_atomically(server.ready_file, json.dumps(facts, indent=1) + "\n")
    log("ready", **facts)
    await tasks[0]
    side_server.should_exit = True
    side_server.force_exit = True
    await asyncio.gather(*tasks)
    service.core.stop(timeout=0.1 if main.force_exit else 5.0)
    _clean_up(server)
    log("stopped")
    return 0


def _server(app: App, drain_seconds: float) -> _Server:
    # Streams get their error event at drain_seconds; uvicorn's own limit comes after it.
    grace = int(drain_seconds) + 3
    settings = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
    )
    return _Server(settings)


def _on_signals(service: Service, main: _Server, drain_seconds: float, log: Log) -> None:
    """First signal drains, second stops at once."""
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        if service.draining:
            log("stopping", signal=name)
            service.core.abort_all("The engine was stopped.")
            main.force_exit = True
            return
        log("draining", signal=name, running=service.core.num_running)
        service.draining = True
        main.should_exit = True
        loop.call_later(drain_seconds, service.core.abort_all, "The engine is shutting down.")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)


async def _started(server: _Server, task: asyncio.Task[None]) -> None:
    while not server.started and not task.done():
        await asyncio.sleep(0.005)


def open_listener(server: ServerConfig) -> socket.socket:
    """Bind early, before minutes of loading. Raises ConfigError when the place is taken."""
    if server.uds is None:
        return _bind_tcp(server.host, server.port)
    _remove_stale(server.uds)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(server.uds))
    except OSError as error:
        raise ConfigError(f"Cannot bind {server.uds}: {error}") from error
    finally:
        os.umask(before)
    return listener


def _bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot bind {host}:{port}: {error}") from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket nobody listens on; refuse one that is in use, or any other file."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} exists and is not a socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise ConfigError(f"Another process listens on {path}.")


def _open_side(server: ServerConfig) -> socket.socket | None:
    if server.uds is None or server.introspection_port is None:
        return None
    return _bind_tcp("127.0.0.1", server.introspection_port)


def _addresses(
    server: ServerConfig, listener: socket.socket, side: socket.socket | None
) -> dict[str, str | None]:
    if server.uds is not None:
        side_url = f"http://127.0.0.1:{side.getsockname()[1]}" if side else None
        return {"uds": str(server.uds), "introspection_url": side_url}
    host = f"[{server.host}]" if ":" in server.host else server.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    return {"url": url, "introspection_url": url}


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file, or all of the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, "utf-8")
    draft.replace(path)


def _clean_up(server: ServerConfig) -> None:
    for path in (server.uds, server.ready_file):
        if path is not None:
            path.unlink(missing_ok=True)
