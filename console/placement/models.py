"""Where replicas may run and do: nodes, their devices, and the ledger of who holds how many bytes of each.

Replicas and deployments are named by id and label only: the fleet builds on this, not the other way round.
"""

from __future__ import annotations

import uuid

import uuid_utils.compat as uuid7
from django.db import models
from django.utils.translation import gettext_lazy as _


class Node(models.Model):
    """A machine."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=80, unique=True)
    simulated = models.BooleanField(default=False)
    cores = models.PositiveIntegerField(default=0)
    memory_bytes = models.BigIntegerField(default=0)
    seen_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Device(models.Model):
    """A card of a node, or the CPU with its memory. What was measured last stands beside what it is."""

    class Kind(models.TextChoices):
        CPU = "cpu", _("CPU")
        GPU = "gpu", _("GPU")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="devices")
    uid = models.CharField(max_length=80, unique=True)  # the driver's: "GPU-5c1f…"; "<node>/cpu"; "sim/0/3"
    kind = models.CharField(max_length=8, choices=Kind.choices)
    index = models.PositiveIntegerField(default=0)  # as the driver counts
    name = models.CharField(max_length=80)  # "A100-80G", "AMD EPYC 9355"
    simulated = models.BooleanField(default=False)
    total_bytes = models.BigIntegerField()
    cores = models.JSONField(default=list, blank=True)  # of a CPU: ids of its cores
    used_bytes = models.BigIntegerField(null=True)  # by whomever, as the driver or the kernel says
    utilisation = models.FloatField(null=True)  # 0 to 1
    temperature = models.FloatField(null=True)  # degrees Celsius
    power_w = models.FloatField(null=True)
    power_limit_w = models.FloatField(null=True)
    processes = models.JSONField(default=list, blank=True)  # [{"pid": 1, "bytes": 2, "ours": true}]
    cordoned = models.BooleanField(default=False)  # takes nobody new
    lost_at = models.DateTimeField(null=True)  # since when it has not been seen
    seen_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["node__name", "kind", "index"]

    def __str__(self) -> str:
        return f"{self.node} {self.name} {self.index}"


class DeviceMinute(models.Model):
    """A device over one minute, for the lines of its page; kept for a day."""

    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="minutes")
    minute = models.DateTimeField()
    utilisation = models.FloatField(null=True)  # mean of what was measured, 0 to 1
    used_bytes = models.BigIntegerField(null=True)  # the highest
    looks = models.PositiveIntegerField(default=1)

    class Meta:
        ordering = ["minute"]
        constraints = [models.UniqueConstraint(fields=["device", "minute"], name="one_row_per_device_and_minute")]
        indexes = [models.Index(fields=["minute"])]

    def __str__(self) -> str:
        return f"{self.device} {self.minute}"


class Reservation(models.Model):
    """One line of the ledger: what one replica holds of one device, until the driver shows it free."""

    class State(models.TextChoices):
        """
        reserved → releasing → released
        reserved: from the decision on. releasing: its worker was told to end, or is gone; the driver still shows bytes.
        """

        RESERVED = "reserved", _("Reserved")
        RELEASING = "releasing", _("Releasing")
        RELEASED = "released", _("Released")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    device = models.ForeignKey(Device, on_delete=models.PROTECT, related_name="reservations")
    replica_id = models.UUIDField(db_index=True)
    deployment_id = models.UUIDField(db_index=True)
    label = models.CharField(max_length=120)  # "smollm2-135m r1"
    model = models.CharField(max_length=120)  # its name in the catalog: models that mix need a larger buffer
    engine = models.CharField(max_length=16)
    priority_class = models.CharField(max_length=8, default="normal")
    state = models.CharField(max_length=10, choices=State.choices, default=State.RESERVED)
    planned = models.JSONField(default=dict)  # bytes by part: weights, kv, activations, overhead
    reserved_bytes = models.BigIntegerField()  # peak need, or what its engine takes at start where that is more
    measured_bytes = models.BigIntegerField(null=True)  # newest
    measured_peak_bytes = models.BigIntegerField(null=True)
    measured_parts = models.JSONField(default=dict, blank=True)  # what the engine itself tells: weights, kv
    cores = models.JSONField(default=list, blank=True)  # of a CPU: ids of the cores it may run on
    exclusive_cores = models.BooleanField(default=True)  # False: shared with others, so it must wait passively
    lent_from = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="lent_to")
    lent_bytes = models.BigIntegerField(default=0)  # of the lender's reserve, to this line
    lends = models.BooleanField(default=False)  # its deployment allows it, and its engine can shrink its pool
    floor_bytes = models.BigIntegerField(default=0, db_default=0)  # what a lender keeps: it can serve one whole window
    unattributed_bytes = models.BigIntegerField(null=True)  # of the device, when releasing began
    reason = models.TextField(blank=True)  # of its newest state
    created_at = models.DateTimeField(auto_now_add=True)
    releasing_at = models.DateTimeField(null=True)
    released_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["replica_id", "device"], condition=~models.Q(state="released"), name="one_line_per_device"
            )
        ]

    def __str__(self) -> str:
        return f"{self.label} on {self.device}: {self.reserved_bytes}"

    @property
    def pool_bytes(self) -> int:
        """The KV pool within what is reserved."""
        return max(0, self.reserved_bytes - self.besides_pool_bytes)

    @property
    def besides_pool_bytes(self) -> int:
        """What is planned for all but KV: weights, activations, runtime."""
        return sum(size for name, size in self.planned.items() if name != "kv")


class Decision(models.Model):
    """One answer of the planner, with its reasons: placed or refused. Append-only."""

    id = models.UUIDField(primary_key=True, default=uuid7.uuid7, editable=False)
    at = models.DateTimeField(auto_now_add=True)
    replica_id = models.UUIDField(null=True)  # none for a question of the form "what if"
    deployment_id = models.UUIDField(null=True)
    label = models.CharField(max_length=120)
    placed = models.BooleanField()
    devices = models.JSONField(default=list)  # uids
    reason = models.TextField()  # in one sentence
    candidates = models.JSONField(default=list)  # per device: fits or not, why, score and its parts
    need = models.JSONField(default=dict)  # what was asked for

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["deployment_id", "-id"])]

    def __str__(self) -> str:
        return f"{self.label}: {self.reason}"


class Overhead(models.Model):
    """What a runtime takes beyond weights and KV, learnt from earlier runs: its own term of the estimate."""

    engine = models.CharField(max_length=16)
    runtime = models.CharField(max_length=120)  # its requirement, or the product's version for the embedded engine
    device_kind = models.CharField(max_length=8)
    bytes = models.BigIntegerField()  # the mean of the newest runs
    highest_bytes = models.BigIntegerField()
    runs = models.PositiveIntegerField(default=1)
    learnt_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["engine", "runtime", "device_kind"], name="one_overhead_per_runtime")
        ]

    def __str__(self) -> str:
        return f"{self.runtime}: {self.bytes}"
