"""Revisions of a deployment: what its workers are started with, kept, so that a rollback has something to go to."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import Max

from console.fleet.models import Deployment, Revision

CONFIG = (
    "runtime_id",
    "quantisation",
    "parameters",
    "arguments",
    "environment",
    "binding",
    "priority_class",
    "spread",
    "planned_concurrency",
    "planned_tokens",
    "lends",
)
"""Columns of a deployment that a worker is started with. A change of any of them makes a new revision."""


def config_of(deployment: Deployment) -> dict[str, Any]:
    """The columns of CONFIG as JSON can hold them."""
    found = {name: getattr(deployment, name) for name in CONFIG}
    return found | {"runtime_id": str(deployment.runtime_id) if deployment.runtime_id else None}


def config_at(deployment: Deployment, number: int) -> dict[str, Any]:
    """The config of one revision; of a deployment that is older than its first Revision row, the columns it has."""
    row = Revision.objects.filter(deployment=deployment, number=number).first()
    return config_of(deployment) if row is None else dict(row.config)


def first_revision(deployment: Deployment, by: str) -> Revision:
    """The row of the revision that a deployment begins with. Idempotent."""
    row, _created = Revision.objects.get_or_create(
        deployment=deployment, number=deployment.revision, defaults={"config": config_of(deployment), "by": by}
    )
    return row


@transaction.atomic
def revise(deployment: Deployment, by: str) -> Revision:
    """Keep the columns as they are now as the next revision, which the controller rolls out.

    Saves every column of CONFIG, and `revision`.
    """
    known = Deployment.objects.select_for_update().get(pk=deployment.pk)
    first_revision(known, by="")  # what runs now, where nothing has kept it yet
    newest = Revision.objects.filter(deployment=known).aggregate(newest=Max("number"))["newest"]
    deployment.revision = newest + 1  # after a rollback there are later ones than the one that is wanted
    deployment.save(update_fields=[*(name.removesuffix("_id") for name in CONFIG), "revision"])
    return Revision.objects.create(
        deployment=deployment, number=deployment.revision, config=config_of(deployment), by=by
    )


@transaction.atomic
def back_to(deployment: Deployment, number: int, by: str) -> Revision:
    """Make an earlier revision's config the newest one. Raises Revision.DoesNotExist."""
    config = Revision.objects.get(deployment=deployment, number=number).config
    for name in CONFIG:
        setattr(deployment, name, config[name])
    return revise(deployment, by)
