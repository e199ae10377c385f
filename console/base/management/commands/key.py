"""`manage.py key create|list|revoke`: API keys from a terminal or a script."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from console.audit.actions import COMMAND_LINE
from console.base.management.limits import add_limits, limits_from
from console.errors import ConsoleError
from console.keys.actions import create_key, revoke_key
from console.keys.models import APIKey
from console.tenants.models import Tenant


class Command(BaseCommand):
    help = "Create, list and revoke API keys. A created key is printed once."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="create | list | revoke")
        create = actions.add_parser("create", help="make a key and print it")
        create.add_argument("--tenant", required=True, help="name of the tenant")
        create.add_argument("--name", default="command line", help="what the key is for")
        create.add_argument("--model", action="append", dest="models", help="allow only this model (repeatable)")
        add_limits(create)
        create.add_argument("--may-override", action="store_true", help="let it choose policy, target and replica")
        create.add_argument("--json", action="store_true", help="{key, id, tenant}")
        listing = actions.add_parser("list", help="list a tenant's keys")
        listing.add_argument("--tenant", required=True)
        listing.add_argument("--json", action="store_true", help="one JSON object a line")
        revoke = actions.add_parser("revoke", help="revoke a key by its id")
        revoke.add_argument("id", type=UUID)

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            getattr(self, "_" + options["action"])(options)
        except ConsoleError as error:
            raise CommandError(str(error)) from error

    def _create(self, options: dict[str, Any]) -> None:
        tenant = _tenant(options["tenant"])
        limits = limits_from(options) | ({"may_override": True} if options["may_override"] else {})
        made = create_key(COMMAND_LINE, tenant, options["name"], options["models"], limits=limits)
        facts = {"key": made.secret, "id": str(made.key.id), "tenant": tenant.name}
        self.stdout.write(json.dumps(facts) if options["json"] else made.secret)

    def _list(self, options: dict[str, Any]) -> None:
        for key in _tenant(options["tenant"]).keys.all():
            facts = {
                "id": str(key.id),
                "name": key.name,
                "display": key.display,
                "kind": key.kind,
                "status": key.status,
            }
            self.stdout.write(json.dumps(facts) if options["json"] else "  ".join(facts.values()))

    def _revoke(self, options: dict[str, Any]) -> None:
        key = APIKey.objects.filter(id=options["id"]).select_related("tenant").first()
        if key is None:
            raise CommandError(f"There is no key with id {options['id']}.")
        revoke_key(COMMAND_LINE, key)
        self.stdout.write(f"{key.name} {key.display} is revoked.")


def _tenant(name: str) -> Tenant:
    tenant = Tenant.objects.filter(name=name).first()
    if tenant is None:
        known = ", ".join(Tenant.objects.values_list("name", flat=True)) or "none"
        raise CommandError(f"There is no tenant named {name}. Known: {known}.")
    return tenant
