"""Write the price book: a price is never changed, only followed by its next version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django.db import connection, transaction
from django.db.models import Max
from django.utils import timezone

from console.audit.actions import Actor, record
from console.base.fields import Check, checked, moment, money, optional, text, told
from console.errors import NotAllowed, Refused
from console.fleet.models import Route
from console.pricing.models import Price

LARGEST = 1_000_000  # of the currency, per million tokens

PRICE_CHECKS: Mapping[str, Check] = {
    "model": text(120),
    "currency": text(3, 3),
    "input": money(LARGEST, 6),
    "cached_input": optional(money(LARGEST, 6)),
    "output": money(LARGEST, 6),
    "effective_at": optional(moment),
}


@transaction.atomic
def set_price(actor: Actor, values: Mapping[str, Any]) -> Price:
    """Add the next version of a model's price in one currency.

    Without `cached_input` cached tokens cost what others do; without `effective_at` it holds at once. Requests keep
    the price under which they were admitted. Raises NotAllowed, or Refused with the field.
    """
    if not actor.is_admin:
        raise NotAllowed("Only platform admins can set prices.")
    found = checked(PRICE_CHECKS, values)
    for name in ("model", "currency", "input", "output"):
        if name not in found:
            raise Refused(f"{name} is missing.", name)
    if not re.fullmatch("[A-Z]{3}", found["currency"]):
        raise Refused("currency must be three capital letters, such as USD.", "currency")
    if not Route.objects.filter(name=found["model"]).exists():
        raise Refused(f"There is no route named {found['model']}.", "model")
    now = timezone.now()
    effective_at = found.get("effective_at") or now
    if effective_at < now:
        raise Refused("effective_at lies in the past: what was used has its price.", "effective_at")
    if found.get("cached_input") is None:
        found["cached_input"] = found["input"]
    price = Price.objects.create(
        **{**found, "effective_at": effective_at},
        version=_next_version(found["model"], found["currency"]),
        created_by=actor.user,
    )
    amounts = {name: told(found[name]) for name in ("input", "cached_input", "output")}
    record(actor, "price.set", price, **amounts, effective_at=effective_at.isoformat())
    return price


def _next_version(model: str, currency: str) -> int:
    """One after the newest; whoever asks at the same time waits for this transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"price {model} {currency}"])
    newest = Price.objects.filter(model=model, currency=currency).aggregate(newest=Max("version"))["newest"]
    return (newest or 0) + 1
