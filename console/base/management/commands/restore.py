"""`manage.py restore`: put a backup back into an empty installation."""

from __future__ import annotations

import shutil
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from console import embedded
from console.base.layout import Layout
from console.supervisor import preflight


class Command(BaseCommand):
    help = "Restore a backup made by `manage.py backup` into this data folder, which must hold no database yet."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, help="what `manage.py backup` printed")

    def handle(self, *_args: Any, **options: Any) -> None:
        folder: Path = options["folder"]
        if not (folder / "database.dump").exists() or not (folder / "secret.key").exists():
            raise CommandError(f"{folder} holds no backup (database.dump and secret.key).")
        if settings.ENV["DATABASE_URL"]:
            raise CommandError("With FANLIGHT_DATABASE_URL set, restore database.dump with your own pg_restore.")
        layout = settings.LAYOUT
        layout.create()
        try:
            with preflight.lock(layout):
                self._restore(layout, folder)
        except preflight.AlreadyRunningError:
            raise CommandError("Fanlight runs on this data folder; stop it first: make down.") from None
        self.stdout.write("Restored. Start it with: make up")

    def _restore(self, layout: Layout, folder: Path) -> None:
        if (layout.postgres_data / "PG_VERSION").exists():
            raise CommandError(f"{layout.data} holds a database already; restore into a new FANLIGHT_DATA_DIR.")
        shutil.copy2(folder / "secret.key", layout.secret_file)
        layout.secret_file.chmod(0o600)
        command = embedded.prepare_postgres(layout, self.stdout.write)
        server = subprocess.Popen(
            command.argv,
            env=command.env,
            cwd="/",
            stderr=subprocess.DEVNULL,
            **embedded.run_as_server_user(),
        )  # type: ignore[call-overload]
        try:
            embedded.wait_for_postgres(layout, lambda: server.poll() is None)
            self._pg_restore(layout, folder / "database.dump")
        except BaseException:
            server.send_signal(command.last_signal)
            server.wait(timeout=60)
            shutil.rmtree(layout.postgres_data)  # made by us a moment ago: the next try finds no database
            raise
        server.send_signal(command.stop_signal)
        server.wait(timeout=60)

    def _pg_restore(self, layout: Layout, dump: Path) -> None:
        tool = embedded.postgres_tool(layout, "pg_restore")
        result = subprocess.run(
            [str(tool), f"--host={layout.sockets}", f"--username={embedded.ROLE}", f"--dbname={embedded.DATABASE}",
             "--no-owner", "--single-transaction", str(dump)],
            capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False,
        )  # fmt: skip
        if result.returncode:
            raise CommandError(f"pg_restore failed:\n{result.stderr.strip()}")
