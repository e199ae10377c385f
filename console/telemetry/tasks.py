"""Upkeep of the telemetry tables. All are idempotent: a second run finds nothing to do."""

from __future__ import annotations

from celery import shared_task

from console.telemetry import content, partitions


@shared_task(acks_late=True)
def make_partitions() -> None:
    """Make the partitions of the week ahead."""
    partitions.ensure()


@shared_task(acks_late=True)
def drop_old_partitions() -> list[str]:
    """Drop partitions past their retention."""
    return partitions.drop_old()


@shared_task(acks_late=True)
def expire_contents() -> int:
    """Delete prompts and answers that are older than their tenants keep them."""
    return content.expire()
