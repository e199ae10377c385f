"""`manage.py limits set|show`: what a tenant or a key may use."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from console.audit.actions import COMMAND_LINE
from console.base.management.limits import add_limits, limits_from
from console.errors import ConsoleError
from console.keys.actions import key_facts, set_key_limits
from console.keys.models import APIKey
from console.keys.queries import live_use
from console.tenants.actions import set_limits, tenant_facts
from console.tenants.models import Tenant


class Command(BaseCommand):
    help = "Set and show the limits of a tenant or a key."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="set | show")
        setting = actions.add_parser("set", help="change what is named, leave the rest")
        showing = actions.add_parser("show", help="print every limit")
        for each in (setting, showing):
            whose = each.add_mutually_exclusive_group(required=True)
            whose.add_argument("--tenant", help="name of the tenant")
            whose.add_argument("--key", type=UUID, help="id of the key")
            each.add_argument("--json", action="store_true", help="one JSON object")
        add_limits(setting)
        setting.add_argument("--weight", help="a tenant's share of a queue, against other tenants' (100)")
        setting.add_argument("--capture-content", choices=("yes", "no"), help="keep a tenant's prompts and answers")
        setting.add_argument("--capture-days", help="for so many days")
        setting.add_argument("--may-override", choices=("yes", "no"), help="let a key choose target and replica")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            facts = self._tenant(options) if options["tenant"] else self._key(options)
        except ConsoleError as error:
            raise CommandError(str(error)) from error
        if options["json"]:
            self.stdout.write(json.dumps(facts))
            return
        for name, value in facts.items():
            self.stdout.write(f"{name}  {'none' if value is None else value}")

    def _tenant(self, options: dict[str, Any]) -> dict[str, Any]:
        tenant = Tenant.objects.filter(name=options["tenant"]).first()
        if tenant is None:
            raise CommandError(f"There is no tenant named {options['tenant']}.")
        if options["action"] == "set":
            tenant = set_limits(COMMAND_LINE, tenant, _given(options))
        return tenant_facts(tenant) | _use(tenant)

    def _key(self, options: dict[str, Any]) -> dict[str, Any]:
        key = APIKey.objects.filter(id=options["key"]).select_related("tenant").first()
        if key is None:
            raise CommandError(f"There is no key with id {options['key']}.")
        if options["action"] == "set":
            key = set_key_limits(COMMAND_LINE, key, _given(options))
        return key_facts(key) | _use(key)


def _use(row: Tenant | APIKey) -> dict[str, Any]:
    """What gateways count of each limit now; "use" is None while that is not known."""
    live = live_use(row)
    if live is None:
        return {"use": None}
    return {"use": {name: {"used": str(use.used), "reserved": str(use.reserved)} for name, use in live.items()}}


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The action refuses what the row does not have, such as a key's weight."""
    others = ("weight", "capture_content", "capture_days", "may_override")
    return limits_from(options) | {name: options[name] for name in others if options[name] is not None}
