"""Read-only views in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from console.base.admin import ReadOnlyAdmin
from console.fleet.models import (
    ControllerLease,
    Deployment,
    Endpoint,
    Replica,
    Route,
    RouteFallback,
    RouteTarget,
    TargetAnalysis,
    Transition,
)


@admin.register(Deployment)
class DeploymentAdmin(ReadOnlyAdmin):
    list_display = ("name", "model", "engine", "desired_replicas", "created_at")
    list_select_related = ("model",)


@admin.register(Replica)
class ReplicaAdmin(ReadOnlyAdmin):
    list_display = ("__str__", "state", "pid", "epoch", "restarts", "ready_at")
    list_select_related = ("deployment",)


@admin.register(Transition)
class TransitionAdmin(ReadOnlyAdmin):
    list_display = ("at", "subject_label", "old", "new", "reason")


@admin.register(Route)
class RouteAdmin(ReadOnlyAdmin):
    list_display = ("name", "policy", "max_model_len", "deadline_s")


@admin.register(RouteTarget)
class RouteTargetAdmin(ReadOnlyAdmin):
    list_display = ("route", "deployment", "role", "weight")
    list_select_related = ("route", "deployment")


@admin.register(TargetAnalysis)
class TargetAnalysisAdmin(ReadOnlyAdmin):
    list_display = ("target", "state", "since", "looked_at", "reason")
    list_select_related = ("target__route", "target__deployment")


@admin.register(RouteFallback)
class RouteFallbackAdmin(ReadOnlyAdmin):
    list_display = ("route", "position", "deployment")
    list_select_related = ("route", "deployment")


@admin.register(Endpoint)
class EndpointAdmin(ReadOnlyAdmin):
    list_display = ("deployment", "base_url", "served_name", "max_num_seqs")
    list_select_related = ("deployment",)
    exclude = ("api_key_sealed",)


@admin.register(ControllerLease)
class ControllerLeaseAdmin(ReadOnlyAdmin):
    list_display = ("holder", "epoch", "expires_at")
