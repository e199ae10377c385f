"""`manage.py shipper`: journals of gateways, dead ones included, into PostgreSQL."""

from __future__ import annotations

import os
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from console.base import logs
from console.base.stopping import asked_to_stop
from console.telemetry.receiver import Address
from console.telemetry.sink import DatabaseSink
from serving.shipper import Shipper

BEHIND_REQUESTS = 5  # niceness: on a full machine records may arrive a little later, requests should not


class Command(BaseCommand):
    help = "Ship the journals of gateways into PostgreSQL, at least once, idempotently; take engines' spans."
    requires_system_checks: list[str] = []

    def handle(self, *_args: Any, **_options: Any) -> None:
        logs.configure(settings.ENV["LOG_LEVEL"])
        os.nice(BEHIND_REQUESTS)
        stop = asked_to_stop()
        Address(settings.LAYOUT.receiver_file).bind().start()
        endpoint = settings.ENV["OTLP_ENDPOINT"]
        if not endpoint:
            Shipper(settings.LAYOUT.journal, DatabaseSink()).run(stop)
            return
        from console.telemetry.export import exporting

        sink = exporting(DatabaseSink(), endpoint, settings.ENV["OTLP_SHARE"])
        Shipper(settings.LAYOUT.journal, sink).run(stop)
        sink.close()
