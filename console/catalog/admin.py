"""Read-only views in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from console.base.admin import ReadOnlyAdmin
from console.catalog.models import Model


@admin.register(Model)
class ModelAdmin(ReadOnlyAdmin):
    list_display = ("name", "source", "state", "quantisation", "context_length")
