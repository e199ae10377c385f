"""Put models into the catalog."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from django.db import transaction

from console.audit.actions import Actor, record
from console.catalog import facts
from console.catalog.models import Model
from console.catalog.sources import WheelSource


@transaction.atomic
def register_fetched(actor: Actor, source: WheelSource, path: Path) -> Model:
    """Record a fetched and checked model, or bring the row that is there up to date. Idempotent."""
    existing = Model.objects.filter(name=source.name).first()
    if existing is not None and existing.path == str(path) and existing.sha256 == source.file_sha256:
        return existing
    values = asdict(facts.read_gguf(path)) | {
        "source": source.spec,
        "path": str(path),
        "sha256": source.file_sha256,
        "licence": source.licence,
        "state": Model.State.READY,
        "reason": "Fetched; SHA-256 matches",
    }
    model, created = Model.objects.update_or_create(name=source.name, defaults=values)
    record(actor, "model.register" if created else "model.update", model, source=source.spec)
    return model
