"""`manage.py settings_table`: docs/settings.md, from the one table of settings."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.environment import ROOT, SETTINGS

DOCUMENT = ROOT / "docs" / "settings.md"


class Command(BaseCommand):
    help = "Write docs/settings.md from the settings table; with --check, fail when it is out of date."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--check", action="store_true", help="write nothing; fail when the document differs")

    def handle(self, *_args: Any, **options: Any) -> None:
        text = render()
        if not options["check"]:
            DOCUMENT.write_text(text)
        elif not DOCUMENT.exists() or DOCUMENT.read_text() != text:
            raise CommandError("docs/settings.md is out of date: run `manage.py settings_table`.")


def render() -> str:
    """The whole document."""
    lines = [
        "# Settings",
        "",
        "Every setting is an environment variable. An unknown or unusable FANLIGHT_* stops the start and says why.",
        "This page is generated from `console/environment.py`; all settings are read at start.",
        "",
        "| variable | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for setting in SETTINGS:
        default = setting.default.replace(str(ROOT), "<clone>") or "(empty)"
        secret = " **Secret.**" if setting.secret else ""
        lines.append(f"| `{setting.variable}` | {setting.kind} | `{default}` | {setting.help}{secret} |")
    return "\n".join(lines) + "\n"
