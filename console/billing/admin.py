"""Read-only views in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from console.base.admin import ReadOnlyAdmin
from console.billing.models import UsageRecord


@admin.register(UsageRecord)
class UsageRecordAdmin(ReadOnlyAdmin):
    list_display = (
        "id",
        "started_at",
        "model",
        "outcome",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
    )
