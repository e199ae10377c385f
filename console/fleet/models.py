"""What runs: deployments (desired), replicas (observed), routes (public names), and every change between states."""

from __future__ import annotations

import uuid

import uuid_utils.compat as uuid7
from django.db import models
from django.utils.translation import gettext_lazy as _

from console.catalog.models import Model


class Deployment(models.Model):
    """Desired state: a Model on an engine with N replicas and its parameters."""

    class Engine(models.TextChoices):
        EMBEDDED = "embedded", _("Embedded (torch)")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=80, unique=True)
    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="deployments")
    engine = models.CharField(max_length=16, choices=Engine.choices, default=Engine.EMBEDDED)
    desired_replicas = models.PositiveIntegerField(default=1)
    parameters = models.JSONField(default=dict, blank=True)  # engine parameters, validated by the adapter
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Replica(models.Model):
    """One running copy of a Deployment's model and the Worker (OS process) that serves it."""

    class State(models.TextChoices):
        """
        pending → starting → loading → verifying → ready → draining → stopped
        starting, loading, verifying, ready → failed → starting (with back-off)
        ready → hung → failed
        The controller owns every transition; only `actions.move_replica` writes one.
        """

        PENDING = "pending", _("Pending")
        STARTING = "starting", _("Starting")
        LOADING = "loading", _("Loading")
        VERIFYING = "verifying", _("Verifying")
        READY = "ready", _("Ready")
        HUNG = "hung", _("Hung")
        FAILED = "failed", _("Failed")
        DRAINING = "draining", _("Draining")
        STOPPED = "stopped", _("Stopped")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="replicas")
    ordinal = models.PositiveIntegerField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    reason = models.TextField(blank=True)
    epoch = models.BigIntegerField(default=0)  # launches so far
    pid = models.IntegerField(null=True)
    pid_started_at = models.FloatField(null=True)  # with pid and epoch: the identity of the process
    uds = models.CharField(max_length=200, blank=True)
    metrics_url = models.CharField(max_length=200, blank=True)
    device = models.CharField(max_length=64, default="cpu")
    engine_version = models.CharField(max_length=40, blank=True)
    facts = models.JSONField(default=dict, blank=True)  # the worker's ready file
    restarts = models.PositiveIntegerField(default=0)
    started_at = models.DateTimeField(null=True)
    ready_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["deployment", "ordinal"]
        constraints = [models.UniqueConstraint(fields=["deployment", "ordinal"], name="one_replica_per_ordinal")]

    def __str__(self) -> str:
        return f"{self.deployment.name} r{self.ordinal}"


class Transition(models.Model):
    """One change of state of a replica, with its reason; `subject_type` leaves room for others. Append-only."""

    id = models.UUIDField(primary_key=True, default=uuid7.uuid7, editable=False)
    at = models.DateTimeField(auto_now_add=True)
    subject_type = models.CharField(max_length=16)  # "replica"
    subject_id = models.UUIDField()
    subject_label = models.CharField(max_length=120)
    old = models.CharField(max_length=16)
    new = models.CharField(max_length=16)
    reason = models.TextField()
    details = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["subject_type", "subject_id", "-id"])]

    def __str__(self) -> str:
        return f"{self.subject_label}: {self.old} → {self.new}"


class Route(models.Model):
    """The public model name and how its requests are spread over deployments."""

    class Policy(models.TextChoices):
        LEAST_CONNECTIONS = "least-connections", _("Least connections")
        ROUND_ROBIN = "round-robin", _("Round robin")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=120, unique=True)
    policy = models.CharField(max_length=24, choices=Policy.choices, default=Policy.LEAST_CONNECTIONS)
    max_model_len = models.PositiveIntegerField(default=0)
    max_prompt_tokens = models.PositiveIntegerField(default=0)
    default_max_tokens = models.PositiveIntegerField(null=True, blank=True)
    deadline_s = models.FloatField(default=600.0)
    first_token_deadline_s = models.FloatField(default=120.0)
    created_at = models.DateTimeField(auto_now_add=True)
    deployments = models.ManyToManyField(Deployment, through="RouteTarget", related_name="routes")

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class RouteTarget(models.Model):
    """One deployment behind a route and its weight."""

    route = models.ForeignKey(Route, on_delete=models.CASCADE, related_name="targets")
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="targets")
    weight = models.PositiveIntegerField(default=100)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["route", "deployment"], name="one_target_per_deployment")]

    def __str__(self) -> str:
        return f"{self.route} → {self.deployment} ({self.weight})"


class ControllerLease(models.Model):
    """One row: which controller leads, under which epoch, until when (database clock)."""

    id = models.SmallIntegerField(primary_key=True, default=1)
    holder = models.CharField(max_length=120, blank=True)
    epoch = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.holder} epoch {self.epoch}"
