"""Does what the catalog was asked for. Often asked in vain: whoever is at work already does it all."""

from __future__ import annotations

from celery import shared_task

from console.catalog import jobs


@shared_task
def work() -> list[str]:
    """Fetch, check, convert and install what waits; the names of what was done."""
    return jobs.work()
