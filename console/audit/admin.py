"""Read-only views in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from console.audit.models import AuditEntry
from console.base.admin import ReadOnlyAdmin


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    list_display = ("at", "actor_label", "action", "target_label", "address")
