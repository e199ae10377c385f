"""`manage.py tenant create|list`."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.audit.actions import COMMAND_LINE
from console.errors import ConsoleError
from console.tenants.actions import create_tenant
from console.tenants.models import Tenant


class Command(BaseCommand):
    help = "Create and list tenants."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="create | list")
        create = actions.add_parser("create", help="make a tenant")
        create.add_argument("name", help="lower-case letters, digits and hyphens")
        create.add_argument("--display-name", default="")
        create.add_argument("--currency", default="USD", help="three letters; it stays")
        create.add_argument("--billing-zone", default="UTC", help="IANA name, where its days and months begin")
        create.add_argument("--json", action="store_true", help="{id, name}")
        listing = actions.add_parser("list", help="list every tenant")
        listing.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["action"] == "create":
            try:
                tenants = [self._create(options)]
            except ConsoleError as error:
                raise CommandError(str(error)) from error
        else:
            tenants = list(Tenant.objects.all())
        for tenant in tenants:
            facts = {"id": str(tenant.id), "name": tenant.name}
            self.stdout.write(json.dumps(facts) if options["json"] else f"{tenant.id}  {tenant.name}")

    def _create(self, options: dict[str, Any]) -> Tenant:
        return create_tenant(
            COMMAND_LINE, options["name"], options["display_name"], options["currency"], options["billing_zone"]
        )
