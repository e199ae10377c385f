"""How a request's cost came about: its tokens times the price under which it was admitted."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from decimal import Decimal

from django.utils.translation import gettext as _

from console.billing.models import UsageRecord
from console.pricing.models import Price

_MILLION = 10**6


@dataclass(frozen=True)
class Line:
    """Tokens of one kind; amounts are per million tokens and in all."""

    title: str
    tokens: int
    per_million: Decimal

    @property
    def amount(self) -> Decimal:
        return self.tokens * self.per_million / _MILLION


@dataclass(frozen=True)
class Bill:
    """The lines add up to what was billed, but for its rounding to whole billionths."""

    price: Price | None = None
    lines: tuple[Line, ...] = ()


def bill_of(request_id: uuid.UUID) -> Bill:
    """The arithmetic of one request; empty where it has no line in the ledger or had no price."""
    usage = UsageRecord.objects.filter(id=request_id).first()
    if usage is None or usage.price_version is None:
        return Bill()
    price = Price.objects.filter(model=usage.model, currency=usage.currency, version=usage.price_version).first()
    if price is None or not usage.cost:
        return Bill(price)
    lines = (
        Line(_("Input, computed"), usage.prompt_tokens - usage.cached_tokens, price.input),
        Line(_("Input, cached"), usage.cached_tokens, price.cached_input),
        Line(_("Output"), usage.completion_tokens, price.output),
    )
    return Bill(price, lines)
