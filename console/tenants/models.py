"""Tenants: who is isolated from whom, and who belongs where."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.core.validators import RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from console.tenants.limits import Limited, Priority


class Tenant(Limited):
    """A team or customer. Keys, usage and requests belong to exactly one."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(
        max_length=64,
        unique=True,
        validators=[RegexValidator(r"^[a-z0-9][a-z0-9-]*$", _("Lower-case letters, digits and hyphens."))],
    )
    display_name = models.CharField(max_length=120, blank=True)
    is_active = models.BooleanField(default=True)
    currency = models.CharField(max_length=3, default="USD")
    billing_zone = models.CharField(max_length=64, default="UTC")
    weight = models.PositiveIntegerField(
        default=100, db_default=100
    )  # its share of a queue, against other tenants' weights
    priority = models.CharField(max_length=8, choices=Priority.choices, default=Priority.NORMAL, db_default="normal")
    capture_content = models.BooleanField(default=False, db_default=False)  # prompts and answers are kept, redacted
    capture_days = models.PositiveSmallIntegerField(default=7, db_default=7)
    created_at = models.DateTimeField(auto_now_add=True)
    members = models.ManyToManyField(settings.AUTH_USER_MODEL, through="Membership", related_name="tenants")

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.display_name or self.name


class Membership(models.Model):
    """A person in a tenant. Owners manage keys; members use the playground and see usage; viewers only see."""

    class Role(models.TextChoices):
        OWNER = "owner", _("Owner")
        MEMBER = "member", _("Member")
        VIEWER = "viewer", _("Viewer")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=8, choices=Role.choices, default=Role.MEMBER)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "user"], name="one_membership_per_tenant")]

    def __str__(self) -> str:
        return f"{self.user} in {self.tenant} ({self.role})"
