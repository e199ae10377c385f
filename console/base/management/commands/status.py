"""`manage.py status`: what runs, as text or JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError

from console.fleet.models import Replica
from console.supervisor import preflight
from console.version import version
from engine.launchers import process


class Command(BaseCommand):
    help = "Show the processes and replicas of this installation. Exit status 1 when it is not up."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object")

    def handle(self, *_args: Any, **options: Any) -> None:
        facts = status()
        if options["json"]:
            self.stdout.write(json.dumps(facts))
        else:
            self._print(facts)
        if facts["phase"] == "down":
            raise SystemExit(1)

    def _print(self, facts: dict[str, Any]) -> None:
        self.stdout.write(f"Fanlight {facts['version']}  {facts['url']}  {facts['phase']}")
        for each in facts["processes"]:
            self.stdout.write(f"  {each['name']:<12} {each['state']:<10} pid {each['pid'] or '-'}")
        for each in facts["replicas"]:
            self.stdout.write(f"  {each['name']:<20} {each['state']:<10} pid {each['pid'] or '-'}  {each['reason']}")


def status() -> dict[str, Any]:
    """{url, version, phase, processes, replicas}; replicas are empty while the database does not answer."""
    state = preflight.read_state(settings.LAYOUT)
    alive = bool(state) and process.is_alive(state.get("pid", 0), state.get("pid_ticks", 0))
    processes = []
    if alive:
        processes = [{"name": "supervisor", "pid": state["pid"], "state": "running", "restarts": 0}]
        processes += [{key: value for key, value in each.items() if key != "pid_ticks"} for each in state["processes"]]
    return {
        "url": settings.PUBLIC_URL,
        "version": version(),
        "phase": state["phase"] if alive else "down",
        "processes": processes,
        "replicas": _replicas() if alive else [],
    }


def _replicas() -> list[dict[str, Any]]:
    try:
        rows = list(Replica.objects.select_related("deployment__model"))
    except DatabaseError:
        return []
    return [
        {
            "id": str(row.id),
            "name": str(row),
            "model": row.deployment.model.name,
            "state": row.state,
            "reason": row.reason,
            "pid": row.pid,
            "metrics_url": row.metrics_url,
        }
        for row in rows
    ]
