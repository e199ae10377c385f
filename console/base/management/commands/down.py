"""`manage.py down`: stop what `manage.py up` started, in order."""

from __future__ import annotations

import signal
import time
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from console.supervisor import preflight
from engine.launchers import process
from engine.launchers.local import LocalLauncher


class Command(BaseCommand):
    help = "Drain and stop everything of this installation, and leave no process behind."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for a clean stop")

    def handle(self, *_args: Any, **options: Any) -> None:
        if not settings.LAYOUT.run.is_dir():
            self.stdout.write("Fanlight is not running.")
            return
        deadline = time.monotonic() + options["timeout"]
        asked: tuple[int, int] | None = None
        while not self._is_gone(asked):
            if time.monotonic() > deadline:
                who = f"The supervisor (pid {asked[0]})" if asked else "A supervisor that has not said its pid"
                raise CommandError(f"{who} has not ended after {options['timeout']:.0f} s.")
            asked = asked or self._ask()
            time.sleep(0.05)
        self.stdout.write("Fanlight is stopped." if asked else "Fanlight is not running.")

    def _is_gone(self, asked: tuple[int, int] | None) -> bool:
        """Whether no supervisor is left; then whatever a killed one left is ended."""
        if asked is not None and process.is_alive(*asked):
            return False
        try:
            with preflight.lock(settings.LAYOUT):
                self._sweep()
        except preflight.AlreadyRunningError:
            return False
        return True

    @staticmethod
    def _ask() -> tuple[int, int] | None:
        """Ask the supervisor to stop; its pid and start time, or None while it has not said who it is."""
        facts = preflight.read_state(settings.LAYOUT)
        pid, ticks = facts.get("pid"), facts.get("pid_ticks")
        if pid and ticks and process.signal_if_same(pid, ticks, signal.SIGTERM):
            return int(pid), int(ticks)
        return None

    def _sweep(self) -> None:
        """No supervisor, or no more: end whatever one that was killed left behind."""
        layout = settings.LAYOUT
        preflight.end_leftovers(layout, self.stdout.write)
        if layout.workers.is_dir():
            launcher = LocalLauncher(layout.workers)
            for replica_id in launcher.known():
                launcher.end(replica_id, 10.0)
        layout.state_file.unlink(missing_ok=True)
