"""Starts everything in order, keeps it running, and stops it in the order that loses nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.db import close_old_connections, connections

from console import embedded
from console.base.layout import write_atomically
from console.fleet.models import Replica
from console.supervisor import bootstrap, preflight, programs
from console.supervisor.child import HURRY_S, Child, Program
from console.supervisor.preflight import CannotStartError
from console.supervisor.programs import CONTROL, SERVERS, SHIP, WEB
from console.supervisor.terminal import Terminal, worker_line
from console.version import version
from engine.launchers import process
from engine.launchers.local import LocalLauncher

# Where to reach a web process that listens on every address.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 names to look up, not addresses to bind
# PostgreSQL's LOG lines and its answer to our own question whether it has started; Valkey's notices.
_EVERYDAY = re.compile(r"\] (LOG|DETAIL|HINT): |the database system is starting up|^\d+:[A-Z] .* [*-] ")
START_ATTEMPTS = 6
READY_TIMEOUT_S = 60.0
WORKERS_S = 15.0  # for workers, once nothing sends them requests
FIRST_WORKER_TIMEOUT_S = 300.0


class Supervisor:
    """One installation in one process tree."""

    def __init__(self, terminal: Terminal) -> None:
        self.layout = settings.LAYOUT
        self.terminal = terminal
        self.children: list[Child] = []
        self.phase = "starting"
        self.hurry = threading.Event()
        self._stopping = threading.Event()
        self._last_state = ""

    # -- start -----------------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[dict[str, str]], None]) -> None:
        """Serve until asked to stop. `on_ready` gets the first credentials (empty when they were shown before).

        Raises CannotStartError or AlreadyRunningError; whatever was started is stopped again.
        """
        self.layout.create()
        with preflight.lock(self.layout):
            self._listen_for_signals()
            try:
                self._start(on_ready)
                self._watch()
            finally:
                self.stop()

    def _start(self, on_ready: Callable[[dict[str, str]], None]) -> None:
        preflight.end_leftovers(self.layout, self.terminal.say)
        self._write_guardian()
        preflight.check_disk(self.layout, settings.ENV["MIN_FREE_DISK_BYTES"])
        preflight.check_port(settings.ENV["BIND"], settings.ENV["PORT"])
        if settings.ENV["GATEWAYS"]:
            preflight.check_port(settings.ENV["BIND"], settings.ENV["GATEWAY_PORT"])
        self._start_servers()
        bootstrap.migrate(self.layout, self.terminal.say)
        self._start_control()
        bootstrap.bundled_model(self.layout, self.terminal.say, self._fetched)
        bootstrap.collect_static(self.layout)
        credentials = bootstrap.first_credentials(self.layout)
        self._adopt(programs.web(settings.ENV["DRAIN_SECONDS"])).start()
        if settings.ENV["GATEWAYS"]:
            self._adopt(programs.gateways(settings.ENV["GATEWAYS"], settings.ENV["DRAIN_SECONDS"])).start()
        self._write_state()
        self._await("the web process", self._web_is_ready, READY_TIMEOUT_S)
        if credentials:
            self.terminal.say("Loading the model")
            self._await("a worker", self._worker_is_ready, FIRST_WORKER_TIMEOUT_S)
        self.phase = "running"
        self._write_state()
        on_ready(credentials)

    def _start_servers(self) -> None:
        if not settings.ENV["DATABASE_URL"]:
            preflight.clean_stale_postmaster(self.layout)
            command = embedded.prepare_postgres(self.layout, self.terminal.say)
            postgres = self._adopt(programs.server(command))
            postgres.start()
        if not settings.ENV["VALKEY_URL"]:
            valkey = self._adopt(programs.server(embedded.prepare_valkey(self.layout)))
            valkey.start()
        self._write_state()
        if not settings.ENV["DATABASE_URL"]:
            embedded.wait_for_postgres(self.layout, lambda: self._keeps_trying(postgres))
        if not settings.ENV["VALKEY_URL"]:
            embedded.wait_for_valkey(self.layout, lambda: self._keeps_trying(valkey))

    def _keeps_trying(self, server: Child) -> bool:
        """Whether a server that may have died while starting is worth waiting for: after a power cut the old one's
        processes can hold its shared memory for a moment."""
        self._check_wanted()
        server.tend()
        return server.restarts < START_ATTEMPTS

    def _fetched(self, percent: int) -> None:
        self._check_wanted()
        self._tend()
        self.terminal.percent(percent)

    def _check_wanted(self) -> None:
        if self._stopping.is_set():
            raise CannotStartError("Stopped while starting.")

    def _start_control(self) -> None:
        """Everything that needs the schema but not the model; the controller waits for a deployment by itself."""
        schedule = self.layout.run / "beat-schedule"
        for program in (programs.controller(), programs.shipper(), programs.jobs(), programs.beat(schedule)):
            self._adopt(program).start()
        self._write_state()

    def _adopt(self, program: Program) -> Child:
        share = settings.ENV["LOG_TOTAL_BYTES"] // 8
        child = Child(program, self.layout.logs / f"{program.name}.log", share, self._show)
        self.children.append(child)
        return child

    def _show(self, name: str, text: str) -> None:
        """The servers' everyday lines stay in their logs; a person sees what went wrong."""
        if name in {"postgres", "valkey"} and _EVERYDAY.search(text):
            return
        self.terminal.line(name, text)

    def _await(self, what: str, is_ready: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            self._tend()
            self._check_wanted()
            for child in self.children:
                if child.restarts >= START_ATTEMPTS:
                    log = self.layout.logs / f"{child.program.name}.log"
                    raise CannotStartError(f"{child.program.name} {child.why}, {child.restarts} times; see {log}.")
            if time.monotonic() > deadline:
                raise CannotStartError(
                    f"{what[0].upper() + what[1:]} was not ready within {timeout_s:.0f} s: {self._why_not()}. "
                    f"Its log is in {self.layout.logs}."
                )
            time.sleep(0.1)

    def _why_not(self) -> str:
        reasons = [f"{replica} is {replica.state}: {replica.reason}" for replica in _replicas()]
        return "; ".join(reasons) or "no reason is known"

    def _web_is_ready(self) -> bool:
        bind = settings.ENV["BIND"]
        host = _LOOPBACK.get(bind, bind)
        try:
            with urllib.request.urlopen(f"http://{host}:{settings.ENV['PORT']}/healthz", timeout=2):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def _worker_is_ready(self) -> bool:
        return any(replica.state == Replica.State.READY for replica in _replicas())

    # -- watch -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(0.2):
            self._tend()

    def _tend(self) -> None:
        for child in self.children:
            happened = child.tend()
            if happened:
                self.terminal.say(happened)
        self._write_state()

    def _listen_for_signals(self) -> None:
        def on_signal(_number: int, _frame: object) -> None:
            if self._stopping.is_set():
                self.hurry.set()
            self._stopping.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, on_signal)

    # -- stop ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop in order; a second Ctrl-C shortens every wait, never the order."""
        self._stopping.set()
        self.phase = "stopping"
        if self.children:
            self._write_state()
            self.terminal.say("Stopping: streams drain first (Ctrl-C again to hurry)")
        for group in (WEB, SHIP, CONTROL):
            self._stop_group(group)
        connections.close_all()
        self._end_workers()
        self._stop_group(SERVERS)
        for child in self.children:
            child.close()
        self._forget()
        if self.children:
            self.terminal.say("Stopped")

    def _stop_group(self, group: int) -> None:
        members = [child for child in reversed(self.children) if child.program.group == group]
        if group == SERVERS:  # one after the other: PostgreSQL goes last
            for child in members:
                child.ask_to_stop()
                child.await_end(time.monotonic() + child.program.grace_s, self.hurry)
            return
        for child in members:
            child.ask_to_stop()
        started = time.monotonic()
        for child in members:
            child.await_end(started + child.program.grace_s, self.hurry)

    def _end_workers(self) -> None:
        """Nobody sends them anything any more; each drains what little is left."""
        launcher = LocalLauncher(self.layout.workers)
        threads = {
            replica_id: threading.Thread(target=launcher.end, args=(replica_id, WORKERS_S))
            for replica_id in launcher.known()
        }
        for thread in threads.values():
            thread.start()
        for replica_id, thread in threads.items():
            while thread.is_alive() and not self.hurry.is_set():
                thread.join(0.05)
            thread.join(HURRY_S)
            if thread.is_alive():
                launcher.kill(replica_id)
                thread.join()

    # -- state -----------------------------------------------------------------------------------------------------

    def _write_guardian(self) -> None:
        """Shims end their worker when the process named here is gone for a minute."""
        ticks = process.start_ticks(os.getpid())
        write_atomically(self.layout.guardian_file, json.dumps({"pid": os.getpid(), "pid_ticks": ticks}))

    def _write_state(self) -> None:
        facts: dict[str, Any] = {
            "pid": os.getpid(),
            "pid_ticks": process.start_ticks(os.getpid()),
            "url": settings.PUBLIC_URL,
            "version": version(),
            "phase": self.phase,
            "processes": [child.facts() for child in self.children],
        }
        text = json.dumps(facts)
        if text == self._last_state:
            return
        self._last_state = text
        try:
            write_atomically(self.layout.state_file, text)
        except OSError as error:  # a full disk is no reason to stop serving
            self.terminal.say(f"The state file could not be written: {error}")

    def _forget(self) -> None:
        self.layout.state_file.unlink(missing_ok=True)
        self.layout.guardian_file.unlink(missing_ok=True)


def _replicas() -> list[Replica]:
    close_old_connections()
    return list(Replica.objects.select_related("deployment"))


def replica_states() -> str:
    """A phrase about the replicas, for the banner."""
    return worker_line([{"name": str(each), "state": each.state} for each in _replicas()])
