"""`manage.py deployment create|set|scale|rollback|sweep|show|list|remove`: which models run on what."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from console.audit.actions import COMMAND_LINE
from console.errors import ConsoleError
from console.fleet import sweeping
from console.fleet.deployment_actions import (
    CHECKS,
    create_deployment,
    remove_deployment,
    roll_back,
    scale,
    set_deployment,
)
from console.fleet.deployment_facts import deployment_facts
from console.fleet.models import Deployment
from console.fleet.route_actions import deployment_named
from console.fleet.sweep import Step, words
from console.fleet.sweeping import Asked

MOST_ASKED = 100_000  # tokens, or rounds
_OBJECTS = ("parameters", "environment")  # given one by one
_OPTIONS = [name for name in CHECKS if name not in (*_OBJECTS, "desired_replicas")]


class Command(BaseCommand):
    help = "Create and change deployments: engine, runtime, parameters, replicas, autoscaling, recycling."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="create | set | scale | rollback | …")
        create = actions.add_parser("create", help="make a deployment; its replicas are placed and started")
        setting = actions.add_parser(
            "set", help="change what is named, leave the rest; rolled out where workers need it"
        )
        scaling = actions.add_parser("scale", help="have so many replicas")
        back = actions.add_parser("rollback", help="make an earlier revision the newest")
        swept = actions.add_parser("sweep", help="find its best max_num_seqs by asking more and more at once")
        showing = actions.add_parser("show", help="print a deployment with its replicas")
        removing = actions.add_parser("remove", help="forget a deployment that has no workers and no routes")
        every = (create, setting, scaling, back, swept, showing, removing)
        for each in every:
            each.add_argument("name")
        create.add_argument("--model", required=True, help="its name in the catalog")
        create.add_argument("--engine", default="embedded", help="embedded, vllm, sglang or trtllm")
        create.add_argument("--replicas", default="1", metavar="N")
        create.add_argument("--route", help="a public name that then leads there; made where there is none")
        for each in (create, setting):
            for field in _OPTIONS:
                each.add_argument(f"--{field.replace('_', '-')}", metavar="VALUE", help="see docs/deployments.md")
            for field, short in (("parameters", "parameter"), ("environment", "variable")):
                each.add_argument(f"--{short}", dest=field, action="append", metavar="NAME=VALUE", help="repeatable")
        scaling.add_argument("replicas", metavar="N")
        back.add_argument("revision", metavar="N")
        _add_sweep(swept)
        listing = actions.add_parser("list", help="list every deployment")
        for each in (*every, listing):
            each.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["action"] == "sweep":  # minutes, and not in one transaction
            self._sweep(options)
            return
        try:
            with transaction.atomic():
                found = getattr(self, "_" + options["action"])(options)
        except ConsoleError as error:
            raise CommandError(str(error)) from error
        for deployment in found:
            facts = deployment_facts(Deployment.objects.get(pk=deployment.pk))
            self.stdout.write(json.dumps(facts) if options["json"] else _readable(facts))

    def _create(self, options: dict[str, Any]) -> list[Deployment]:
        values = _given(options) | {name: options[name] for name in ("model", "engine") if options[name]}
        values |= {"desired_replicas": options["replicas"], "route": options["route"] or ""}
        return [create_deployment(COMMAND_LINE, options["name"], values)]

    def _set(self, options: dict[str, Any]) -> list[Deployment]:
        deployment, values = deployment_named(options["name"]), _given(options)
        for name in _OBJECTS:
            if name in values:  # what is not named stays, here too
                values[name] = {**getattr(deployment, name), **values[name]}
        return [set_deployment(COMMAND_LINE, deployment, values)]

    def _scale(self, options: dict[str, Any]) -> list[Deployment]:
        return [scale(COMMAND_LINE, deployment_named(options["name"]), options["replicas"])]

    def _rollback(self, options: dict[str, Any]) -> list[Deployment]:
        return [roll_back(COMMAND_LINE, deployment_named(options["name"]), options["revision"])]

    def _sweep(self, options: dict[str, Any]) -> None:
        asked = Asked(**{name: options[name] for name in Asked.__dataclass_fields__})
        try:
            verdict = sweeping.run(COMMAND_LINE, deployment_named(options["name"]), asked, self._tell(options["json"]))
        except ConsoleError as error:
            raise CommandError(str(error)) from error
        best = verdict.best.sequences if verdict.best else None
        why = words(verdict.stopped_by)
        advice = f"max_num_seqs={best}" if best else "None was good enough"
        self.stdout.write(json.dumps({"best": best, "stopped_by": why}) if options["json"] else f"{advice}. {why}")

    def _tell(self, as_json: bool) -> Callable[[Step], None]:
        def say(step: Step) -> None:
            line = (
                f"{step.sequences:5d} at once  {step.tokens_s:9.1f} tokens/s  P50 {step.p50_s:7.2f} s  "
                f"P99 {step.p99_s:7.2f} s  KV {step.kv_peak:4.0%}"
            )
            self.stdout.write(json.dumps(asdict(step)) if as_json else line)
            self.stdout.flush()

        return say

    def _show(self, options: dict[str, Any]) -> list[Deployment]:
        return [deployment_named(options["name"])]

    def _list(self, _options: dict[str, Any]) -> list[Deployment]:
        return list(Deployment.objects.exclude(engine=Deployment.Engine.EXTERNAL))

    def _remove(self, options: dict[str, Any]) -> list[Deployment]:
        remove_deployment(COMMAND_LINE, deployment_named(options["name"]))
        self.stdout.write(f"{options['name']} is removed.")
        return []


def _add_sweep(parser: ArgumentParser) -> None:
    sizes = (("prompt-tokens", 256, 8, "of a prompt, about"), ("answer-tokens", 64, 1, "of an answer"))
    for name, default, least, what in (*sizes, ("rounds", 3, 1, "how often each of the sequences is filled")):
        parser.add_argument(f"--{name}", type=_at_least(least), default=default, metavar="N", help=what)
    parser.add_argument("--p99", dest="p99_limit_s", type=_seconds, metavar="S", help="the most that P99 may be")
    parser.add_argument("--in-service", action="store_true", help="although a route leads there")


def _at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= MOST_ASKED:
            raise ArgumentTypeError(f"must be a whole number from {least} to {MOST_ASKED}.")
        return int(text)

    return whole


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ArgumentTypeError("must be seconds, more than 0.")
    return seconds


def _given(options: dict[str, Any]) -> dict[str, Any]:
    values = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    for name in _OBJECTS:
        if options[name] is not None:
            values[name] = dict(_pair(text) for text in options[name])
    return values


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandError(f"{text} must look like NAME=VALUE.")
    return name, value


def _readable(facts: dict[str, Any]) -> str:
    on = f"{facts['model']} on {facts['runtime'] or facts['engine']}"
    ready = sum(replica["state"] == "ready" for replica in facts["replicas"])
    lines = [f"{facts['name']}  {on}  revision {facts['revision']}  {ready} of {facts['desired_replicas']} ready"]
    lines += [f"  {each['name']}  {each['state']}  {each['device']}  {each['reason']}" for each in facts["replicas"]]
    return "\n".join(lines)
