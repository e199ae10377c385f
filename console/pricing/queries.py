"""Reads of the price book."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from console.pricing.models import Price


@dataclass(frozen=True)
class Version:
    """One price and how it stands: "in force", "planned" or "past"."""

    price: Price
    state: str


def in_force(model: str, currency: str, at: datetime | None = None) -> Price | None:
    """The price under which a request admitted at `at` (now) is billed."""
    found = Price.objects.filter(model=model, currency=currency, effective_at__lte=at or timezone.now())
    return found.order_by("-effective_at", "-version").first()


def history(models: Iterable[str] | None = None, now: datetime | None = None) -> list[Version]:
    """All versions by model and currency, newest first."""
    now = now or timezone.now()
    prices = Price.objects.all() if models is None else Price.objects.filter(model__in=list(models))
    found, holding = [], set()
    for price in prices:  # newest first within a model and currency
        if price.effective_at > now:
            state = "planned"
        elif (price.model, price.currency) in holding:
            state = "past"
        else:
            state = "in force"
            holding.add((price.model, price.currency))
        found.append(Version(price, state))
    return found
