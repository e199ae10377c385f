"""`manage.py user create|password`: people who sign in."""

from __future__ import annotations

import getpass
import sys
from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from console.audit.actions import COMMAND_LINE, record
from console.base.models import User
from console.tenants.actions import add_member
from console.tenants.models import Membership, Tenant


class Command(BaseCommand):
    help = "Create people and set passwords, read from the terminal or standard input, never from an argument."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="create | password")
        create = actions.add_parser("create", help="make a person")
        create.add_argument("name")
        create.add_argument("--admin", action="store_true", help="a platform admin")
        create.add_argument("--tenant", help="put them into this tenant")
        create.add_argument("--role", choices=Membership.Role.values, default=Membership.Role.MEMBER)
        password = actions.add_parser("password", help="set a forgotten password")
        password.add_argument("name")
        for each in (create, password):
            each.add_argument(
                "--keep",
                action="store_true",
                help="do not ask for a new password at the next sign-in",
            )

    @transaction.atomic
    def handle(self, *_args: Any, **options: Any) -> None:
        user = User.objects.filter(username=options["name"]).first()
        if options["action"] == "create":
            if user is not None:
                raise CommandError(f"There is a person named {options['name']} already.")
            user = User(username=options["name"], is_staff=options["admin"], is_superuser=options["admin"])
        elif user is None:
            raise CommandError(f"There is no person named {options['name']}.")
        user.set_password(_read_password(user))
        user.must_change_password = not options["keep"]
        user.save()
        record(COMMAND_LINE, f"user.{options['action']}", user)
        if options.get("tenant"):
            tenant = Tenant.objects.filter(name=options["tenant"]).first()
            if tenant is None:
                raise CommandError(f"There is no tenant named {options['tenant']}.")
            add_member(COMMAND_LINE, tenant, user, options["role"])
        self.stdout.write(f"{user.username} can sign in.")


def _read_password(user: User) -> str:
    password = getpass.getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise CommandError(" ".join(error.messages)) from error
    return password
