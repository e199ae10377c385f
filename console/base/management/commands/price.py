"""`manage.py price set|list`: the price book."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.audit.actions import COMMAND_LINE
from console.errors import ConsoleError
from console.pricing.actions import set_price
from console.pricing.facts import price_facts
from console.pricing.queries import history


class Command(BaseCommand):
    help = "Set and list prices per million tokens. A price is never changed: setting one adds its next version."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="set | list")
        setting = actions.add_parser("set", help="add the next version of a model's price")
        setting.add_argument("model", help="the public name, as callers write it")
        setting.add_argument("--currency", default="USD", help="three letters")
        setting.add_argument("--input", required=True, metavar="AMOUNT", help="per million input tokens")
        setting.add_argument(
            "--cached-input", metavar="AMOUNT", help="of those, cached ones; as the others if left out"
        )
        setting.add_argument("--output", required=True, metavar="AMOUNT", help="per million output tokens")
        setting.add_argument("--effective-at", help="ISO 8601; now if left out")
        listing = actions.add_parser("list", help="list every version, the newest first")
        listing.add_argument("--model", help="only this model's")
        for each in (setting, listing):
            each.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["action"] == "set":
            names = ("model", "currency", "input", "cached_input", "output", "effective_at")
            try:
                price = set_price(COMMAND_LINE, {name: options[name] for name in names})
            except ConsoleError as error:
                raise CommandError(str(error)) from error
            versions = [version for version in history([price.model]) if version.price == price]
        else:
            versions = history([options["model"]] if options["model"] else None)
        for version in versions:
            facts = price_facts(version)
            self.stdout.write(json.dumps(facts) if options["json"] else "  ".join(map(str, facts.values())))
