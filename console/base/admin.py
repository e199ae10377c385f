"""Django's admin, read-only: every write of Fanlight goes through an action, which the admin would bypass."""

from __future__ import annotations

from typing import Any

from axes.models import AccessAttempt, AccessFailureLog, AccessLog
from django.contrib import admin
from django.contrib.auth.models import Group
from django.http import HttpRequest

from console.base.models import SnapshotVersion, User

admin.site.site_header = admin.site.site_title = "Fanlight"


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Platform admins may look; nobody adds, changes or deletes."""

    show_full_result_count = False
    actions = None

    def has_module_permission(self, request: HttpRequest) -> bool:
        return request.user.is_active and request.user.is_staff

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.is_active and request.user.is_staff

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


admin.site.unregister(Group)
for model in (AccessAttempt, AccessFailureLog, AccessLog):
    if admin.site.is_registered(model):
        admin.site.unregister(model)


@admin.register(AccessAttempt)
class AccessAttemptAdmin(ReadOnlyAdmin):
    list_display = ("attempt_time", "username", "ip_address", "failures_since_start")


@admin.register(User)
class UserAdmin(ReadOnlyAdmin):
    list_display = (
        "username",
        "email",
        "is_active",
        "is_staff",
        "must_change_password",
        "last_login",
    )
    list_filter = ("is_active", "is_staff")
    search_fields = ("username", "email")
    exclude = ("password",)


@admin.register(SnapshotVersion)
class SnapshotVersionAdmin(ReadOnlyAdmin):
    list_display = ("id", "version")
