"""`manage.py endpoint add|set|list|remove`: OpenAI-compatible APIs that somebody else runs."""

from __future__ import annotations

import getpass
import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from console.audit.actions import COMMAND_LINE
from console.errors import ConsoleError
from console.fleet.endpoint_actions import add_endpoint, endpoint_facts, remove_endpoint, set_endpoint
from console.fleet.models import Deployment, Endpoint
from console.fleet.route_actions import create_route, deployment_named, set_target


class Command(BaseCommand):
    help = "Add, change, list and remove external endpoints. A key is read from the terminal or standard input."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="add | set | list | remove")
        add = actions.add_parser("add", help="make a deployment of an endpoint")
        setting = actions.add_parser("set", help="change what is named, leave the rest")
        remove = actions.add_parser("remove", help="forget an endpoint that no route leads to")
        for each in (add, setting, remove):
            each.add_argument("name", help="of the deployment")
        add.add_argument("--route", help="make a public name that leads there")
        for each in (add, setting):
            each.add_argument("--url", help="base URL, before /v1; https unless FANLIGHT_EGRESS_ALLOW lists its host")
            each.add_argument("--model", help="the model's name there")
            each.add_argument("--slots", metavar="N", help="requests sent there at once; 0: any number")
            each.add_argument("--with-key", action="store_true", help="read its API key")
        listing = actions.add_parser("list", help="list every endpoint")
        for each in (add, setting, listing):
            each.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            with transaction.atomic():
                endpoints = getattr(self, "_" + options["action"])(options)
        except ConsoleError as error:
            raise CommandError(str(error)) from error
        for endpoint in endpoints:
            facts = endpoint_facts(endpoint)
            self.stdout.write(
                json.dumps(facts) if options["json"] else "  ".join(str(v) or "-" for v in facts.values())
            )

    def _add(self, options: dict[str, Any]) -> list[Endpoint]:
        deployment = add_endpoint(COMMAND_LINE, options["name"], _given(options))
        if options["route"]:
            set_target(COMMAND_LINE, create_route(COMMAND_LINE, options["route"]), deployment, {})
        return [deployment.endpoint]

    def _set(self, options: dict[str, Any]) -> list[Endpoint]:
        return [set_endpoint(COMMAND_LINE, deployment_named(options["name"]), _given(options))]

    def _remove(self, options: dict[str, Any]) -> list[Endpoint]:
        remove_endpoint(COMMAND_LINE, deployment_named(options["name"]))
        self.stdout.write(f"{options['name']} is removed, and its key forgotten.")
        return []

    def _list(self, _options: dict[str, Any]) -> list[Endpoint]:
        external = Deployment.objects.filter(engine=Deployment.Engine.EXTERNAL).select_related("endpoint")
        return [deployment.endpoint for deployment in external]


def _given(options: dict[str, Any]) -> dict[str, Any]:
    names = {"base_url": "url", "served_name": "model", "max_num_seqs": "slots"}
    given = {field: options[name] for field, name in names.items() if options[name] is not None}
    return given | ({"api_key": _read_key()} if options["with_key"] else {})


def _read_key() -> str:
    return getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
