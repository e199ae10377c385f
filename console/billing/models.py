"""The ledger of usage: one immutable line per authenticated request. A trigger refuses UPDATE and DELETE."""

from __future__ import annotations

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
    price_version = models.IntegerField(null=True)

    class Meta:
        ordering = ["id"]
        indexes = [
            models.Index(fields=["tenant_id", "started_at"]),
            models.Index(fields=["started_at"]),
        ]

    def __str__(self) -> str:
        return str(self.id)
