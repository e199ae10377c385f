"""Read-only views in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from console.base.admin import ReadOnlyAdmin
from console.keys.models import APIKey


@admin.register(APIKey)
class APIKeyAdmin(ReadOnlyAdmin):
    list_display = ("name", "display", "tenant", "kind", "expires_at", "revoked_at")
    exclude = ("digest",)
