"""The price book: what a model's tokens cost. Append-only: a change is a new version; a trigger refuses the rest."""

from __future__ import annotations

import uuid
from decimal import Decimal

from django.conf import settings
from django.db import models

from serving.port import Price as PriceStruct

MICRO = 10**6


def _amount() -> models.DecimalField[Decimal, Decimal]:
    return models.DecimalField(max_digits=15, decimal_places=6)  # of the currency, per million tokens


class Price(models.Model):
    """One version of a model's price in one currency. In force: the newest `effective_at` that has come."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    model = models.CharField(max_length=120)  # the public name that callers put into "model"
    currency = models.CharField(max_length=3)
    version = models.PositiveIntegerField()
    input = _amount()
    cached_input = _amount()
    output = _amount()
    effective_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        on_delete=models.DO_NOTHING,  # the row refuses every change, and outlives the account
        db_constraint=False,
        related_name="+",
    )

    class Meta:
        ordering = ["model", "currency", "-effective_at", "-version"]
        constraints = [models.UniqueConstraint(fields=["model", "currency", "version"], name="one_price_per_version")]

    def __str__(self) -> str:
        return f"{self.model} {self.currency} v{self.version}"

    def as_struct(self) -> PriceStruct:
        """As gateways get it: whole micro-units per million tokens."""
        return PriceStruct(
            version=self.version,
            currency=self.currency,
            input=micro(self.input),
            cached_input=micro(self.cached_input),
            output=micro(self.output),
        )


def micro(amount: Decimal) -> int:
    """An amount in whole micro-units."""
    return int(amount * MICRO)
