"""`manage.py request ID`: one request through every layer, on a terminal."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError
from django.forms import model_to_dict

from console.telemetry.models import RequestDetail, RequestRecord
from serving.port import PHASES


class Command(BaseCommand):
    help = "Show a request's record, phases and events by its x-request-id."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", type=UUID)
        parser.add_argument("--json", action="store_true", help="{record, detail}")

    def handle(self, *_args: Any, **options: Any) -> None:
        record = RequestRecord.objects.filter(id=options["id"]).first()
        if record is None:
            raise CommandError(f"No request {options['id']}: not delivered yet, or past its retention.")
        detail = RequestDetail.objects.filter(id=options["id"], started_at=record.started_at).first()
        body = detail.body if detail else {}
        if options["json"]:
            self.stdout.write(json.dumps({"record": model_to_dict(record), "detail": body}, default=str))
        else:
            self._print(record, body)

    def _print(self, record: RequestRecord, body: dict[str, Any]) -> None:
        self.stdout.write(
            f"{record.id}  {record.model}  {record.outcome}  {record.prompt_tokens} in "
            f"({record.cached_tokens} cached), {record.completion_tokens} out, {record.duration_us / 1000:.1f} ms"
        )
        width = max(map(len, PHASES))
        for name, start, end, _args in body.get("phases", []):
            self.stdout.write(f"  {name:<{width}}  {start / 1000:10.2f}  {(end - start) / 1000:10.2f} ms")
        self.stdout.write(f"  {'unattributed':<{width}}  {'':10}  {record.unattributed_us / 1000:10.2f} ms")
