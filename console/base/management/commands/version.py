"""`manage.py version`."""

from __future__ import annotations

import json
import platform
from argparse import ArgumentParser
from importlib import metadata
from typing import Any

import django
from django.core.management.base import BaseCommand

from console.version import commit, version


class Command(BaseCommand):
    help = "Print the version of Fanlight and of what it stands on."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object")

    def handle(self, *_args: Any, **options: Any) -> None:
        facts = {
            "fanlight": version(),
            "commit": commit(),
            "python": platform.python_version(),
            "django": django.get_version(),
            "torch": metadata.version("torch"),
        }
        self.stdout.write(json.dumps(facts) if options["json"] else f"Fanlight {facts['fanlight']} ({facts['commit']})")
