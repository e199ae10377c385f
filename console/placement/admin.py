"""Read-only views in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from console.base.admin import ReadOnlyAdmin
from console.placement.models import Decision, Device, Node, Overhead, Reservation


@admin.register(Node)
class NodeAdmin(ReadOnlyAdmin):
    list_display = ("name", "simulated", "cores", "memory_bytes", "seen_at")


@admin.register(Device)
class DeviceAdmin(ReadOnlyAdmin):
    list_display = ("uid", "node", "name", "total_bytes", "used_bytes", "simulated", "cordoned", "lost_at")
    list_filter = ("kind", "simulated", "cordoned")


@admin.register(Reservation)
class ReservationAdmin(ReadOnlyAdmin):
    list_display = (
        "label",
        "device",
        "state",
        "reserved_bytes",
        "measured_bytes",
        "lent_bytes",
        "created_at",
        "reason",
    )
    list_filter = ("state", "engine")


@admin.register(Decision)
class DecisionAdmin(ReadOnlyAdmin):
    list_display = ("at", "label", "placed", "reason")
    list_filter = ("placed",)


@admin.register(Overhead)
class OverheadAdmin(ReadOnlyAdmin):
    list_display = ("engine", "runtime", "device_kind", "bytes", "highest_bytes", "runs", "learnt_at")
