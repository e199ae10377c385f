"""`manage.py content erase`: prompts and answers that tenants keep."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from console.audit.actions import COMMAND_LINE
from console.errors import ConsoleError
from console.telemetry.content import erase
from console.tenants.models import Tenant


class Command(BaseCommand):
    help = "Erase kept prompts and answers, of one tenant or of one request. Records and the ledger stay."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="erase")
        erasing = actions.add_parser("erase", help="erase them now")
        which = erasing.add_mutually_exclusive_group(required=True)
        which.add_argument("--tenant", help="name of the tenant")
        which.add_argument("--request", type=UUID, help="id of the request")
        erasing.add_argument("--json", action="store_true", help="{erased}")

    def handle(self, *_args: Any, **options: Any) -> None:
        tenant = None
        if options["tenant"]:
            tenant = Tenant.objects.filter(name=options["tenant"]).first()
            if tenant is None:
                raise CommandError(f"There is no tenant named {options['tenant']}.")
        try:
            erased = erase(COMMAND_LINE, tenant=tenant, request_id=options["request"])
        except ConsoleError as error:
            raise CommandError(str(error)) from error
        told = json.dumps({"erased": erased}) if options["json"] else f"Erased of {erased} requests."
        self.stdout.write(told)
