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
        EXTERNAL = "external", _("External endpoint")

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


class Endpoint(models.Model):
    """Where an external deployment is reached: an OpenAI-compatible API that somebody else runs."""

    deployment = models.OneToOneField(Deployment, on_delete=models.CASCADE, related_name="endpoint")
    base_url = models.CharField(max_length=300)  # scheme, host, port, path before /v1
    served_name = models.CharField(max_length=120)  # the model's name there
    api_key_sealed = models.TextField(blank=True)  # see console.base.sealing
    api_key_end = models.CharField(max_length=4, blank=True)  # to recognise it by
    max_num_seqs = models.PositiveIntegerField(default=0)  # requests sent there at once; 0: unbounded

    def __str__(self) -> str:
        return f"{self.served_name} at {self.base_url}"


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
    subject_type = models.CharField(max_length=16)  # "replica", or "route": what became of one of its targets
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
        LOAD_AWARE = "load-aware", _("Load-aware")
        PREFIX_AWARE = "prefix-aware", _("Prefix-aware")
        SESSION_AFFINITY = "session-affinity", _("Session affinity")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=120, unique=True)
    policy = models.CharField(max_length=24, choices=Policy.choices, default=Policy.LEAST_CONNECTIONS)
    sticky = models.BooleanField(default=True, db_default=True)  # a key stays with one target while weights stay
    queue_timeout_s = models.FloatField(default=10.0, db_default=10.0)
    max_queued = models.PositiveIntegerField(default=1000, db_default=1000)
    max_queued_tokens = models.PositiveIntegerField(default=4_000_000, db_default=4_000_000)
    max_attempts = models.PositiveSmallIntegerField(default=3, db_default=3)
    hedge_after_s = models.FloatField(null=True, blank=True)
    max_model_len = models.PositiveIntegerField(default=0)
    max_prompt_tokens = models.PositiveIntegerField(default=0)
    default_max_tokens = models.PositiveIntegerField(null=True, blank=True)
    deadline_s = models.FloatField(default=600.0)
    first_token_deadline_s = models.FloatField(default=120.0)
    inter_token_deadline_s = models.FloatField(default=60.0, db_default=60.0)
    objective_availability = models.FloatField(null=True, blank=True)  # share of requests that end well
    objective_ttft_p99_ms = models.FloatField(null=True, blank=True)
    objective_itl_p99_ms = models.FloatField(null=True, blank=True)
    objective_jitter = models.FloatField(null=True, blank=True)  # ITL p99 over p50
    created_at = models.DateTimeField(auto_now_add=True)
    deployments = models.ManyToManyField(Deployment, through="RouteTarget", related_name="routes")

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class RouteTarget(models.Model):
    """One deployment behind a route. Weights are relative; a shadow gets copies of weight percent of the requests."""

    class Role(models.TextChoices):
        STABLE = "stable", _("Stable")
        CANARY = "canary", _("Canary")
        SHADOW = "shadow", _("Shadow")

    route = models.ForeignKey(Route, on_delete=models.CASCADE, related_name="targets")
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="targets")
    weight = models.PositiveIntegerField(default=100)
    role = models.CharField(max_length=8, choices=Role.choices, default=Role.STABLE, db_default="stable")

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["route", "deployment"], name="one_target_per_deployment")]

    def __str__(self) -> str:
        return f"{self.route} → {self.deployment} ({self.role} {self.weight})"


class TargetAnalysis(models.Model):
    """How a canary or shadow does since it got its weight: the newest verdict and the figures behind it.

    A table of its own, because a write to targets makes every gateway read its configuration again.
    """

    class State(models.TextChoices):
        """
        running → passed → rolled_back
        running, passed → failing → rolled_back: evidence against it that cannot be acted on (a shadow; nowhere to go)
        A new weight or role begins again at running.
        """

        RUNNING = "running", _("not decided yet")
        PASSED = "passed", _("passed")
        FAILING = "failing", _("worse than stable")
        ROLLED_BACK = "rolled_back", _("rolled back")

    target = models.OneToOneField(RouteTarget, on_delete=models.CASCADE, related_name="analysis")
    weight = models.PositiveIntegerField()  # with role: what is judged; another one begins anew
    role = models.CharField(max_length=8)
    since = models.DateTimeField()  # requests from then on count
    state = models.CharField(max_length=12, choices=State.choices, default=State.RUNNING)
    reason = models.TextField(blank=True)
    measures = models.JSONField(default=list, blank=True)  # serving.canary.Measure as objects
    looked_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name_plural = "target analyses"

    def __str__(self) -> str:
        return f"{self.target}: {self.state}"


class RouteFallback(models.Model):
    """A deployment that answers when no target can; in the order of `position`."""

    route = models.ForeignKey(Route, on_delete=models.CASCADE, related_name="fallbacks")
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="fallback_of")
    position = models.PositiveSmallIntegerField()

    class Meta:
        ordering = ["position"]
        constraints = [models.UniqueConstraint(fields=["route", "deployment"], name="one_fallback_per_deployment")]

    def __str__(self) -> str:
        return f"{self.route} → {self.deployment} (fallback {self.position})"


class ControllerLease(models.Model):
    """One row: which controller leads, under which epoch, until when (database clock)."""

    id = models.SmallIntegerField(primary_key=True, default=1)
    holder = models.CharField(max_length=120, blank=True)
    epoch = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.holder} epoch {self.epoch}"
