"""`manage.py transitions`: what changed state lately, and why."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from console.fleet.models import Transition


class Command(BaseCommand):
    help = "Print the newest transitions of replicas, rollouts and routes with their reasons."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--limit", type=int, default=50)
        parser.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *_args: Any, **options: Any) -> None:
        for row in Transition.objects.all()[: options["limit"]]:
            facts = {
                "at": row.at.isoformat(),
                "subject": row.subject_label,
                "old": row.old,
                "new": row.new,
                "reason": row.reason,
            }
            self.stdout.write(json.dumps(facts) if options["json"] else "  ".join(facts.values()))
