"""Who did what to what, when and from where. Append-only: a trigger refuses UPDATE and DELETE."""

from __future__ import annotations

import uuid_utils.compat as uuid7
from django.conf import settings
from django.db import models


class AuditEntry(models.Model):
    """One write by a person or by Fanlight itself. `actor_label` outlives the account."""

    id = models.UUIDField(primary_key=True, default=uuid7.uuid7, editable=False)
    at = models.DateTimeField(auto_now_add=True)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="+",
    )
    actor_label = models.CharField(max_length=150)
    action = models.CharField(max_length=64)  # "key.create"
    target_type = models.CharField(max_length=32)
    target_id = models.CharField(max_length=64)
    target_label = models.CharField(max_length=200, blank=True)
    tenant_id = models.UUIDField(null=True)
    details = models.JSONField(default=dict)
    address = models.GenericIPAddressField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["tenant_id", "-id"])]
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return f"{self.actor_label} {self.action} {self.target_label}"
