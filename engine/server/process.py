"""The serving process: sockets, signals, the ready file, and a drain that ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from engine.boot import Engine, build
from engine.config import EngineConfig
from engine.server.app import App, EngineApp
from engine.server.service import Service
from engine.server.sockets import Listeners, ServerConfig, open_listeners

KEEP_ALIVE_S = 120
"""Longer than a gateway pools idle connections, so that it never writes into one just closed."""


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
    listeners = open_listeners(server)
    engine = build(config, lambda done: log("loading", done=round(done, 3)))
    log("loaded", **engine.facts())
    if engine.path.passed_over is not None:
        log("slower_path", serving=engine.path.target, because=engine.path.passed_over)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(engine, server, listeners, key, log))


async def _serve(engine: Engine, server: ServerConfig, listeners: Listeners, key: str | None, log: Log) -> int:
    service = Service(engine, key)
    service.core.start()
    main = _server(EngineApp(service), server.drain_seconds)
    tasks = [asyncio.create_task(main.serve([listeners.main]))]
    side_server = _server(EngineApp(service, inference=False), 1.0)
    if listeners.side is not None:
        tasks.append(asyncio.create_task(side_server.serve([listeners.side])))
    _on_signals(service, main, server.drain_seconds, log)
    await _started(main, tasks[0])
    facts = {"pid": os.getpid(), **listeners.addresses(server), **engine.facts()}
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
        timeout_keep_alive=KEEP_ALIVE_S,
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


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file, or all of the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, "utf-8")
    draft.replace(path)


def _clean_up(server: ServerConfig) -> None:
    for path in (server.uds, server.ready_file):
        if path is not None:
            path.unlink(missing_ok=True)
