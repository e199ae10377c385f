"""`manage.py route create|set|target|show|list`: public model names and where their requests go."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from console.audit.actions import COMMAND_LINE
from console.errors import ConsoleError
from console.fleet.models import Route, RouteTarget
from console.fleet.route_actions import (
    ROUTE_CHECKS,
    TARGET_CHECKS,
    create_route,
    deployment_named,
    remove_target,
    set_fallbacks,
    set_route,
    set_target,
)
from console.fleet.route_facts import route_facts


class Command(BaseCommand):
    help = "Create and change routes: policy, bounds, objectives, targets with weights and roles, fallbacks."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="create | set | target | show | list")
        create = actions.add_parser("create", help="make a public name")
        create.add_argument("--deployment", action="append", default=[], help="a target of weight 100 (repeatable)")
        setting = actions.add_parser("set", help="change what is named, leave the rest")
        target = actions.add_parser("target", help="add a deployment, change its weight or role, or take it out")
        showing = actions.add_parser("show", help="print a route with its targets")
        for each in (create, setting, target, showing):
            each.add_argument("name")
        for each in (create, setting):
            for field in ROUTE_CHECKS:
                each.add_argument(f"--{field.replace('_', '-')}", metavar="VALUE", help="see docs/gateway.md")
            each.add_argument(
                "--fallback", action="append", help="a deployment, in order (repeatable); none: no fallback"
            )
        target.add_argument("deployment")
        target.add_argument("--weight", help="relative; of a shadow, percent of the requests")
        target.add_argument("--role", choices=RouteTarget.Role.values)
        target.add_argument("--unevaluated", help="yes: a quantised one may take over 5 percent without an evaluation")
        target.add_argument("--remove", action="store_true", help="take it out of the route")
        listing = actions.add_parser("list", help="list every route")
        for each in (create, setting, target, showing, listing):
            each.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            with transaction.atomic():
                routes = getattr(self, "_" + options["action"])(options)
        except ConsoleError as error:
            raise CommandError(str(error)) from error
        for route in routes:
            facts = route_facts(route)
            self.stdout.write(json.dumps(facts) if options["json"] else _readable(facts))

    def _create(self, options: dict[str, Any]) -> list[Route]:
        route = create_route(COMMAND_LINE, options["name"], _rules(options))
        for name in options["deployment"]:
            set_target(COMMAND_LINE, route, deployment_named(name), {})
        _fallbacks(route, options)
        return [route]

    def _set(self, options: dict[str, Any]) -> list[Route]:
        route = set_route(COMMAND_LINE, _route(options["name"]), _rules(options))
        _fallbacks(route, options)
        return [route]

    def _target(self, options: dict[str, Any]) -> list[Route]:
        route, deployment = _route(options["name"]), deployment_named(options["deployment"])
        if options["remove"]:
            remove_target(COMMAND_LINE, route, deployment)
        else:
            given = {name: options[name] for name in TARGET_CHECKS if options[name] is not None}
            set_target(COMMAND_LINE, route, deployment, given)
        return [route]

    def _show(self, options: dict[str, Any]) -> list[Route]:
        return [_route(options["name"])]

    def _list(self, _options: dict[str, Any]) -> list[Route]:
        return list(Route.objects.all())


def _route(name: str) -> Route:
    route = Route.objects.filter(name=name).first()
    if route is None:
        known = ", ".join(Route.objects.values_list("name", flat=True)) or "none"
        raise CommandError(f"There is no route named {name}. Known: {known}.")
    return route


def _rules(options: dict[str, Any]) -> dict[str, Any]:
    given = {name: options[name] for name in ROUTE_CHECKS if options[name] is not None}
    return {name: "" if value == "none" else value for name, value in given.items()}


def _fallbacks(route: Route, options: dict[str, Any]) -> None:
    if options["fallback"] is not None:
        set_fallbacks(COMMAND_LINE, route, [] if options["fallback"] == ["none"] else options["fallback"])


def _readable(facts: dict[str, Any]) -> str:
    lines = [f"{name}  {'none' if value is None else value}" for name, value in facts.items() if name != "targets"]
    return "\n".join([*lines, *map(_target, facts["targets"])])


def _target(target: dict[str, Any]) -> str:
    line = f"target  {target['deployment']}  {target['role']} {target['weight']}"
    analysis = target.get("analysis")
    return f"{line}  {analysis['state']} since {analysis['since']}: {analysis['reason']}" if analysis else line
