"""Telemetry rows as the shipper writes them. Both tables are partitioned by day on started_at (see migration 0001).

The database's key is (started_at, id); Django is told `id` alone. started_at is the UUIDv7's own millisecond stamp,
so either gives the other: query with both, or the planner visits every partition.
"""

from __future__ import annotations

from decimal import Decimal

from django.db import models


class RequestRecord(models.Model):
    """Scalars of one Request; lists and charts read only this. Times are microseconds. See serving.port."""

    id = models.UUIDField(primary_key=True)
    started_at = models.DateTimeField()
    tenant_id = models.UUIDField(null=True)
    key_id = models.UUIDField(null=True)
    source = models.CharField(max_length=10)
    endpoint = models.CharField(max_length=16)
    model = models.CharField(max_length=120)
    stream = models.BooleanField()
    outcome = models.CharField(max_length=14)
    status = models.SmallIntegerField()
    code = models.CharField(max_length=64)
    finish_reason = models.CharField(max_length=16)
    deployment_id = models.UUIDField(null=True)
    replica_id = models.UUIDField(null=True)
    device = models.CharField(max_length=64)
    attempts = models.SmallIntegerField()
    prompt_tokens = models.IntegerField()
    cached_tokens = models.IntegerField()
    completion_tokens = models.IntegerField()
    duration_us = models.BigIntegerField()
    ttft_us = models.BigIntegerField(null=True)
    itl_p50_us = models.BigIntegerField(null=True)
    itl_p99_us = models.BigIntegerField(null=True)
    itl_max_us = models.BigIntegerField(null=True)
    gateway_us = models.BigIntegerField()
    queue_us = models.BigIntegerField()
    engine_queue_us = models.BigIntegerField()
    prefill_us = models.BigIntegerField()
    decode_us = models.BigIntegerField()
    unattributed_us = models.BigIntegerField()
    preemptions = models.SmallIntegerField()
    role = models.CharField(max_length=8, db_default="")
    retries = models.SmallIntegerField(db_default=0)
    currency = models.CharField(max_length=3, db_default="")
    cost = models.DecimalField(max_digits=24, decimal_places=9, db_default=Decimal(0))
    requests = models.IntegerField(db_default=1)
    end_user = models.CharField(max_length=16)
    client_request_id = models.CharField(max_length=64)
    trace_id = models.CharField(max_length=32)
    gateway = models.CharField(max_length=64)
    gateway_version = models.CharField(max_length=24)
    snapshot_version = models.BigIntegerField()
    engine_version = models.CharField(max_length=40)

    class Meta:
        managed = False
        db_table = "telemetry_requestrecord"

    def __str__(self) -> str:
        return str(self.id)


class RequestDetail(models.Model):
    """Events and decisions of one Request: serving.port.RequestDetail as JSON (gaps included)."""

    id = models.UUIDField(primary_key=True)
    started_at = models.DateTimeField()
    body = models.JSONField()

    class Meta:
        managed = False
        db_table = "telemetry_requestdetail"

    def __str__(self) -> str:
        return str(self.id)


class EngineSpan(models.Model):
    """A span that an engine told of a Request by OTLP; see telemetry.engine_spans. By its machine's wall clock."""

    span_id = models.CharField(max_length=16, primary_key=True)
    request_id = models.UUIDField()
    started_at = models.DateTimeField()  # of the request: the key of the partition
    parent_id = models.CharField(max_length=16)
    name = models.CharField(max_length=80)
    service = models.CharField(max_length=80)
    begun_ns = models.BigIntegerField()
    ended_ns = models.BigIntegerField()
    attributes = models.JSONField()

    class Meta:
        managed = False
        db_table = "telemetry_enginespan"

    def __str__(self) -> str:
        return f"{self.name} of {self.request_id}"


class RequestContent(models.Model):
    """The words of one Request, redacted: serving.port.RequestContent as JSON. See telemetry.content for who reads."""

    id = models.UUIDField(primary_key=True)
    started_at = models.DateTimeField(db_index=True)
    tenant_id = models.UUIDField(db_index=True)
    body = models.JSONField()

    def __str__(self) -> str:
        return str(self.id)
