"""What runs: deployments (desired), replicas (observed), routes (public names), and every change between states."""

from __future__ import annotations

import uuid

import uuid_utils.compat as uuid7
from django.db import models
from django.utils.translation import gettext_lazy as _

from console.catalog.models import Model, Runtime


class Deployment(models.Model):
    """Desired state: a Model on an engine with N replicas and its parameters."""

    class Engine(models.TextChoices):
        EMBEDDED = "embedded", _("Embedded (torch)")
        VLLM = "vllm", "vLLM"
        SGLANG = "sglang", "SGLang"
        TRTLLM = "trtllm", "TensorRT-LLM"
        EXTERNAL = "external", _("External endpoint")

    class Signal(models.TextChoices):
        BUSY = "busy", _("Busy: share of time in steps × fill of the batch")
        UTILISATION = "utilisation", _("GPU utilisation")
        REQUESTS = "requests", _("Requests per second and replica")
        QUEUE_WAIT = "queue_wait", _("Wait in the queue")

    class Spread(models.TextChoices):
        PACK = "pack", _("Pack: fill cards one after another")
        SPREAD = "spread", _("Spread: over as many cards as there are")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=80, unique=True)
    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="deployments")
    engine = models.CharField(max_length=16, choices=Engine.choices, default=Engine.EMBEDDED)
    # what a worker is started with: a change of any of these is a new revision, which is rolled out
    runtime = models.ForeignKey(Runtime, null=True, blank=True, on_delete=models.PROTECT, related_name="deployments")
    quantisation = models.CharField(max_length=16, blank=True, default="", db_default="")  # empty: as stored
    parameters = models.JSONField(default=dict, blank=True)  # engine parameters, validated by the adapter
    arguments = models.JSONField(default=list, blank=True, db_default=[])  # free-form ones, by a permission of its own
    environment = models.JSONField(default=dict, blank=True, db_default={})  # from the adapter's list
    binding = models.JSONField(default=list, blank=True, db_default=[])  # uids of devices; empty: the planner chooses
    priority_class = models.CharField(max_length=8, default="normal", db_default="normal")
    spread = models.CharField(max_length=8, choices=Spread.choices, default=Spread.PACK, db_default="pack")
    planned_concurrency = models.PositiveIntegerField(default=0, db_default=0)  # 0: max_num_seqs
    planned_tokens = models.PositiveIntegerField(default=0, db_default=0)  # of one request; 0: an eighth of the context
    lends = models.BooleanField(default=False, db_default=False)  # reserved bytes that it does not use
    revision = models.PositiveIntegerField(default=1, db_default=1)
    evaluated = models.BooleanField(default=False, db_default=False)  # a quantised one against its full-precision twin
    # how many
    desired_replicas = models.PositiveIntegerField(default=1)
    min_replicas = models.PositiveIntegerField(default=1, db_default=1)  # 0: may stop when nobody asks
    max_replicas = models.PositiveIntegerField(default=1, db_default=1)
    autoscale = models.BooleanField(default=False, db_default=False)
    signal = models.CharField(max_length=16, choices=Signal.choices, default=Signal.BUSY, db_default="busy")
    scale_up_at = models.FloatField(default=0.70, db_default=0.70)
    scale_up_after_s = models.PositiveIntegerField(default=300, db_default=300)
    scale_down_at = models.FloatField(default=0.25, db_default=0.25)
    scale_down_after_s = models.PositiveIntegerField(default=1800, db_default=1800)
    cool_down_s = models.PositiveIntegerField(default=300, db_default=300)
    schedules = models.JSONField(default=list, blank=True, db_default=[])  # see fleet.autoscaler.Schedule
    # when a worker is replaced by a fresh one
    max_requests = models.PositiveIntegerField(null=True, blank=True)
    max_age_s = models.PositiveIntegerField(null=True, blank=True)
    max_rss_bytes = models.BigIntegerField(null=True, blank=True)
    # learnt
    start_s = models.FloatField(null=True)  # from a worker's launch until it is ready, as its last starts took
    sweep = models.JSONField(null=True)  # the newest over max_num_seqs: see fleet.sweeping
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        permissions = [("free_arguments", "May pass free-form arguments to engines and add runtimes")]

    def __str__(self) -> str:
        return self.name


class Revision(models.Model):
    """What a deployment's workers are or were started with; the newest that was verified is what a rollback goes to."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="revisions")
    number = models.PositiveIntegerField()
    config = models.JSONField()  # of fleet.revisions.CONFIG
    by = models.CharField(max_length=150, blank=True)
    verified_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-number"]
        constraints = [models.UniqueConstraint(fields=["deployment", "number"], name="one_revision_per_number")]

    def __str__(self) -> str:
        return f"{self.deployment} revision {self.number}"


class Rollout(models.Model):
    """One revision replacing another, replica by replica."""

    class Strategy(models.TextChoices):
        SURGE = "surge", _("Surge: the new one is ready before an old one goes")
        DIP = "dip", _("Dip: an old one makes room first")

    class State(models.TextChoices):
        """
        running → done
        running → rolling_back → rolled_back
        running, rolling_back → failed: the old revision cannot be served either
        running → superseded: a newer revision was wanted meanwhile
        """

        RUNNING = "running", _("Running")
        DONE = "done", _("Done")
        ROLLING_BACK = "rolling_back", _("Rolling back")
        ROLLED_BACK = "rolled_back", _("Rolled back")
        SUPERSEDED = "superseded", _("Superseded")
        FAILED = "failed", _("Failed")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="rollouts")
    from_revision = models.PositiveIntegerField()
    to_revision = models.PositiveIntegerField()
    strategy = models.CharField(max_length=8, choices=Strategy.choices, default=Strategy.SURGE)
    state = models.CharField(max_length=12, choices=State.choices, default=State.RUNNING)
    back_to = models.PositiveIntegerField(null=True)  # once it is rolling back
    reason = models.TextField(blank=True)
    started_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-started_at"]

    def __str__(self) -> str:
        return f"{self.deployment} {self.from_revision} → {self.to_revision}"


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
        pending → starting → loading → verifying → ready → draining → stopped → starting (wanted again)
        starting, loading, verifying, ready → failed → starting (with back-off)
        ready → hung → failed
        stopped, failed → pending: there is no room for it now
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
    revision = models.PositiveIntegerField(default=1, db_default=1)  # that its worker was started with
    wanted = models.BooleanField(default=True, db_default=True)  # False: it is drained and stopped
    why = models.TextField(blank=True, db_default="")  # it is wanted, or no longer
    drain_s = models.PositiveIntegerField(null=True)  # bound of its drain; none: as long as requests may take
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    state_at = models.DateTimeField(null=True)  # when it entered that state
    reason = models.TextField(blank=True)
    failures = models.PositiveIntegerField(default=0, db_default=0)  # in a row: the next start waits longer
    settled_rss_bytes = models.BigIntegerField(null=True)  # of its worker, once warm: growth counts from there
    epoch = models.BigIntegerField(default=0)  # launches so far
    pid = models.IntegerField(null=True)
    pid_started_at = models.FloatField(null=True)  # with pid and epoch: the identity of the process
    uds = models.CharField(max_length=200, blank=True)
    metrics_url = models.CharField(max_length=200, blank=True)
    device = models.CharField(max_length=64, default="cpu")
    devices = models.JSONField(default=list, blank=True, db_default=[])  # uids of those it was placed on
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


class StackCapture(models.Model):
    """What the threads of a hung worker were doing, taken before it was ended."""

    id = models.UUIDField(primary_key=True, default=uuid7.uuid7, editable=False)
    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="stacks")
    epoch = models.BigIntegerField()
    at = models.DateTimeField(auto_now_add=True)
    reason = models.TextField()
    text = models.TextField()

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.replica} epoch {self.epoch}"


class ScaleDecision(models.Model):
    """What the autoscaler saw and why it acted or did not. Held decisions are kept when their reason changes."""

    class Verdict(models.TextChoices):
        UP = "up", _("One more")
        DOWN = "down", _("One fewer")
        HOLD = "hold", _("Held")
        SCHEDULE = "schedule", _("By schedule")
        WAKE = "wake", _("Woken by a request")
        SLEEP = "sleep", _("Stopped: nobody asks")

    id = models.UUIDField(primary_key=True, default=uuid7.uuid7, editable=False)
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="scale_decisions")
    at = models.DateTimeField(auto_now_add=True)
    verdict = models.CharField(max_length=10, choices=Verdict.choices)
    code = models.CharField(max_length=32, blank=True)  # of the reason: "cool_down", "at_max"
    reason = models.TextField()
    before = models.PositiveIntegerField()
    after = models.PositiveIntegerField()
    signal = models.JSONField(default=dict)  # name, value, what it was compared with

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["deployment", "-id"])]

    def __str__(self) -> str:
        return f"{self.deployment}: {self.before} → {self.after}, {self.reason}"


class SignalSample(models.Model):
    """A deployment's signals over one minute, for the autoscaler's page and for a new leader to go on from."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="signal_samples")
    minute = models.DateTimeField()
    replicas = models.PositiveIntegerField()  # ready ones
    busy = models.FloatField(null=True)
    utilisation = models.FloatField(null=True)
    requests = models.FloatField(null=True)  # per second and replica
    queue_wait = models.FloatField(null=True)  # seconds

    class Meta:
        ordering = ["minute"]
        constraints = [models.UniqueConstraint(fields=["deployment", "minute"], name="one_sample_per_minute")]

    def __str__(self) -> str:
        return f"{self.deployment} {self.minute}"


class Transition(models.Model):
    """One change of state of a replica, with its reason; `subject_type` leaves room for others. Append-only."""

    id = models.UUIDField(primary_key=True, default=uuid7.uuid7, editable=False)
    at = models.DateTimeField(auto_now_add=True)
    subject_type = models.CharField(max_length=16)  # "replica"; "rollout"; "route": what became of one of its targets
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
    on_stopped = models.CharField(max_length=8, default="refuse", db_default="refuse")  # or "hold": wait for the start
    hold_s = models.FloatField(default=300.0, db_default=300.0)
    max_held = models.PositiveIntegerField(default=100, db_default=100)
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
    unevaluated = models.BooleanField(default=False, db_default=False)  # lets one that is not evaluated have any share

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
