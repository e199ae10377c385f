"""`manage.py up`: set up what is missing and serve everything of this installation."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from console.base.layout import Layout, write_atomically
from console.embedded import EmbeddedServerError
from console.environment import ROOT
from console.supervisor import bootstrap
from console.supervisor.child import RotatingFile
from console.supervisor.preflight import AlreadyRunningError, CannotStartError
from console.supervisor.supervisor import Supervisor, replica_states
from console.supervisor.terminal import Terminal


class Command(BaseCommand):
    help = "Set up what is missing and serve: database, console, gateway, workers and jobs, in one terminal."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--detach",
            action="store_true",
            help="return when ready; non-zero with the reason if not",
        )
        parser.add_argument("--ready-fd", type=int, help="(internal) where a detached run reports")

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["detach"]:
            self._detach()
        else:
            self._serve(options["ready_fd"])

    def _serve(self, ready_fd: int | None) -> None:
        layout = _made_layout()
        # Nobody looks at a detached run: what it shows goes to a file of bounded size.
        log = None if ready_fd is None else RotatingFile(layout.logs / "up.log", settings.ENV["LOG_TOTAL_BYTES"] // 8)
        terminal = Terminal(log)

        def on_ready(credentials: dict[str, str]) -> None:
            if ready_fd is None:
                model, replicas = bootstrap.default_model(), replica_states()
                if terminal.banner(settings.PUBLIC_URL, model, credentials, replicas):
                    bootstrap.forget_credentials(layout)
                return
            if credentials:
                write_atomically(layout.credentials_file, json.dumps({**credentials, "shown": True}, indent=2))
            _report(
                ready_fd,
                {"ready": True, "first": bool(credentials), "model": bootstrap.default_model()},
            )

        try:
            Supervisor(terminal).run(on_ready)
        except AlreadyRunningError as error:
            url = error.facts.get("url", settings.PUBLIC_URL)
            terminal.say(f"Fanlight is already up at {url} (pid {error.facts.get('pid', '?')}); make down stops it.")
            _report(ready_fd, {"ready": True, "first": False, "already": True, "model": ""})
        except (CannotStartError, EmbeddedServerError, OSError) as error:
            _report(ready_fd, {"ready": False, "reason": str(error)})
            raise CommandError(f"Fanlight cannot start. {error}") from None

    def _detach(self) -> None:
        layout = _made_layout()
        log = layout.logs / "up.log"
        reading, writing = os.pipe()
        with log.open("w") as output:
            supervisor = subprocess.Popen(
                [sys.executable, str(ROOT / "manage.py"), "up", "--ready-fd", str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[writing],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        os.close(writing)
        self.stdout.write(f"Starting; the first start fetches a model of 93 MB. Log: {log}")
        self.stdout.flush()
        try:
            with os.fdopen(reading) as pipe:
                text = pipe.readline()
        except KeyboardInterrupt:
            supervisor.terminate()
            supervisor.wait()
            raise CommandError("Stopped while starting.") from None
        if not text:
            raise CommandError(f"Fanlight ended while starting. {_tail(log)}")
        report = json.loads(text)
        if not report["ready"]:
            raise CommandError(f"Fanlight cannot start. {report['reason']}")
        if report.get("already"):
            self.stdout.write(f"Fanlight is already up at {settings.PUBLIC_URL}")
            return
        self.stdout.write(f"Fanlight is up at {settings.PUBLIC_URL}")
        if report["first"]:
            self.stdout.write(f"First sign-in and API key (read it, then delete it): {layout.credentials_file}")
        else:
            self.stdout.write("The worker may still be loading: .venv/bin/python manage.py status")


def _made_layout() -> Layout:
    layout: Layout = settings.LAYOUT
    try:
        layout.create()
    except OSError as error:
        raise CommandError(f"Fanlight cannot start. {error}") from None
    return layout


def _report(ready_fd: int | None, facts: dict[str, Any]) -> None:
    if ready_fd is not None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(ready_fd, "w") as pipe:  # who asked may have gone
            pipe.write(json.dumps(facts) + "\n")


def _tail(log: Any) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "Its last lines:\n" + "\n".join(lines[-10:])
