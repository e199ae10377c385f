"""Read-only views in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from console.base.admin import ReadOnlyAdmin
from console.pricing.models import Price


@admin.register(Price)
class PriceAdmin(ReadOnlyAdmin):
    list_display = ("model", "currency", "version", "input", "cached_input", "output", "effective_at")
