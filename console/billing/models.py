"""The ledger of usage: one immutable line per request or fold of refusals. A trigger refuses UPDATE and DELETE."""

from __future__ import annotations

from decimal import Decimal

from django.db import models


class UsageRecord(models.Model):
    """See serving.port.UsageRecord. Inserted by the shipper, once per request id."""

    id = models.UUIDField(primary_key=True)
    started_at = models.DateTimeField()
    tenant_id = models.UUIDField()
    key_id = models.UUIDField()
    model = models.CharField(max_length=120)
    outcome = models.CharField(max_length=14)
    prompt_tokens = models.IntegerField()
    cached_tokens = models.IntegerField()
    completion_tokens = models.IntegerField()
    reasoning_tokens = models.IntegerField()
    price_version = models.IntegerField(null=True)  # None: the model had no price in the tenant's currency
    # Defaults of the database: a version that knows nothing of money may still be writing.
    currency = models.CharField(max_length=3, db_default="")
    cost = models.DecimalField(max_digits=24, decimal_places=9, db_default=Decimal(0))
    requests = models.IntegerField(db_default=1)  # more: refusals that were folded into this line

    class Meta:
        ordering = ["id"]
        indexes = [
            models.Index(fields=["tenant_id", "started_at"]),
            models.Index(fields=["key_id", "started_at"]),
            models.Index(fields=["started_at"]),
        ]

    def __str__(self) -> str:
        return str(self.id)
