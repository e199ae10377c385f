"""People, and the counter that tells gateways that their configuration changed."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils.translation import gettext_lazy as _


class User(AbstractUser):
    """A person who signs in to the console. `is_staff` makes a platform admin; others see their tenants."""

    class Theme(models.TextChoices):
        SYSTEM = "", _("Follow the system")
        LIGHT = "light", _("Light")
        DARK = "dark", _("Dark")

    must_change_password = models.BooleanField(default=False)
    language = models.CharField(max_length=12, blank=True, default="")
    theme = models.CharField(max_length=8, blank=True, default="", choices=Theme.choices)
    time_zone = models.CharField(max_length=64, blank=True, default="")


class SnapshotVersion(models.Model):
    """One row. Triggers on the snapshot tables add one and NOTIFY in the writer's transaction."""

    id = models.SmallIntegerField(primary_key=True, default=1)
    version = models.BigIntegerField(default=1)

    def __str__(self) -> str:
        return str(self.version)
