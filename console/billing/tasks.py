"""Upkeep of budgets. Idempotent: a correction is a compare-and-set, so a second run at once finds nothing to do."""

from __future__ import annotations

import logging
import time

import msgspec
import redis
from celery import shared_task

from console.billing import reconcile
from console.billing.reconcile import Look
from console.coordination import Away
from console.fleet import live

log = logging.getLogger(__name__)

_KEY = "fanlight:reconcile"
_KEPT_S = 600


@shared_task(acks_late=True)
def reconcile_limits() -> list[str]:
    """Correct what budgets have spent where it differs from the ledger for a minute; the names of those corrected."""
    try:
        with live.client() as valkey:
            kept = valkey.get(_KEY)
            before = msgspec.json.decode(kept, type=dict[str, Look]) if kept else {}
            looks, corrected = reconcile.run(before, time.time())
            valkey.set(_KEY, msgspec.json.encode(looks), ex=_KEPT_S)
    except (redis.RedisError, Away) as error:
        log.warning("limits are not compared with the ledger: Valkey does not answer (%s)", type(error).__name__)
        return []
    for name in corrected:
        log.warning("budget %s differed from the ledger and was corrected", name)
    return corrected
