"""`manage.py usage`: the ledger, one line per request or fold of refusals."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.base.fields import told
from console.billing.models import UsageRecord
from console.tenants.models import Tenant

_FIELDS = (
    "model",
    "outcome",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "price_version",
    "currency",
    "cost",
    "requests",
)


class Command(BaseCommand):
    help = "Print usage records, oldest first, one a line below the names of the columns."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--since", required=True, help="ISO 8601; without an offset it is UTC")
        parser.add_argument("--tenant", help="only this tenant")
        parser.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *_args: Any, **options: Any) -> None:
        records = UsageRecord.objects.filter(started_at__gte=_since(options["since"])).order_by("id")
        names = dict(Tenant.objects.values_list("id", "name"))
        if options["tenant"]:
            ids = [tenant_id for tenant_id, name in names.items() if name == options["tenant"]]
            if not ids:
                raise CommandError(f"There is no tenant named {options['tenant']}.")
            records = records.filter(tenant_id=ids[0])
        if not options["json"]:
            self.stdout.write("  ".join(("request_id", "key_id", "tenant", *_FIELDS, "started_at")))
        for record in records.iterator(chunk_size=2000):
            facts = {
                "request_id": str(record.id),
                "key_id": str(record.key_id),
                "tenant": names.get(record.tenant_id, str(record.tenant_id)),
                **{name: told(getattr(record, name)) for name in _FIELDS},
                "started_at": record.started_at.astimezone(UTC).isoformat(),
            }
            line = json.dumps(facts) if options["json"] else "  ".join(map(_readable, facts.values()))
            self.stdout.write(line)


def _readable(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _since(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(f"--since {text} is not an ISO 8601 time, such as 2026-01-31T12:00:00Z.") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)
