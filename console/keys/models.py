"""API keys. Only a digest is kept; the key itself is shown once, when it is made."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.tenants.limits import Limited, Priority
from console.tenants.models import Tenant


class APIKey(Limited):
    """One key of a tenant. The playground of a tenant is a key without a digest: nobody can present it."""

    class Kind(models.TextChoices):
        API = "api", _("API")
        PLAYGROUND = "playground", _("Playground")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="keys")
    name = models.CharField(max_length=80)
    kind = models.CharField(max_length=10, choices=Kind.choices, default=Kind.API)
    digest = models.CharField(max_length=64, unique=True, null=True)
    display = models.CharField(max_length=16, blank=True)
    allowed_models = ArrayField(models.CharField(max_length=120), null=True, blank=True)
    priority = models.CharField(
        max_length=8, choices=Priority.choices, blank=True, db_default=""
    )  # empty: the tenant's
    may_override = models.BooleanField(
        default=False, db_default=False
    )  # may choose policy, target and replica by header
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant"],
                condition=models.Q(kind="playground"),
                name="one_playground_key_per_tenant",
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.display}"

    @property
    def status(self) -> str:
        """ "active", "expired" or "revoked"."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= timezone.now():
            return "expired"
        return "active"
