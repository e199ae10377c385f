"""`manage.py controller`: makes what runs match what is wanted."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from console.base import logs
from console.base.stopping import asked_to_stop
from console.fleet.controller import Controller
from engine.launchers.local import LocalLauncher


class Command(BaseCommand):
    help = "Reconcile deployments with replicas: start, verify, watch and restart workers."
    requires_system_checks: list[str] = []

    def handle(self, *_args: Any, **_options: Any) -> None:
        logs.configure(settings.ENV["LOG_LEVEL"])
        stop = asked_to_stop()
        launcher = LocalLauncher(settings.LAYOUT.workers, settings.LAYOUT.guardian_file)
        Controller(launcher).run(stop)
