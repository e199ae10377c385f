"""`manage.py down`: stop what `manage.py up` started, in order."""

from __future__ import annotations

import os
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
        layout = settings.LAYOUT
        state = preflight.read_state(layout)
        pid, ticks = state.get("pid"), state.get("pid_ticks")
        if pid and ticks and process.is_alive(pid, ticks):
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + options["timeout"]
            while process.is_alive(pid, ticks):
                if time.monotonic() > deadline:
                    raise CommandError(f"The supervisor (pid {pid}) has not ended after {options['timeout']:.0f} s.")
                time.sleep(0.05)
            self.stdout.write("Fanlight is stopped.")
            return
        self._sweep()

    def _sweep(self) -> None:
        """No supervisor: end whatever one that was killed left behind."""
        layout = settings.LAYOUT
        preflight.end_leftovers(layout, self.stdout.write)
        if layout.workers.is_dir():
            launcher = LocalLauncher(layout.workers)
            for replica_id in launcher.known():
                launcher.end(replica_id, 10.0)
        layout.state_file.unlink(missing_ok=True)
        self.stdout.write("Fanlight is not running.")
