"""`manage.py backup`: the database and the secrets into one folder."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from console.catalog.models import Model
from console.embedded import EmbeddedServerError
from console.supervisor import bootstrap
from console.supervisor.preflight import CannotStartError
from console.version import version


class Command(BaseCommand):
    help = "Back up the database, the secrets and a manifest of models into a new folder (0700)."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "folder",
            nargs="?",
            type=Path,
            help="default: a dated folder in the data folder's backups/",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        layout = settings.LAYOUT
        folder = options["folder"] or layout.backups / f"{timezone.now():%Y%m%dT%H%M%S}"
        if folder.exists():
            raise CommandError(f"{folder} is there already; name a new folder.")
        folder.mkdir(parents=True, mode=0o700)
        try:
            bootstrap.dump(layout, folder / "database.dump")
        except (CannotStartError, EmbeddedServerError) as error:
            folder.rmdir()
            raise CommandError(str(error)) from error
        shutil.copy2(layout.secret_file, folder / "secret.key")
        models = list(Model.objects.values("name", "source", "sha256", "disk_bytes"))
        (folder / "manifest.json").write_text(json.dumps({"version": version(), "models": models}, indent=2))
        self.stdout.write(str(folder))
