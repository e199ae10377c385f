"""The two telemetry tables, partitioned by day. Partitions are made ahead and dropped by telemetry.partitions."""

from django.db import migrations

FORWARD = """
CREATE TABLE telemetry_requestrecord (
    id uuid NOT NULL,
    started_at timestamptz NOT NULL,
    tenant_id uuid,
    key_id uuid,
    replica_id uuid,
    deployment_id uuid,
    duration_us bigint NOT NULL,
    ttft_us bigint,
    itl_p50_us bigint,
    itl_p99_us bigint,
    itl_max_us bigint,
    gateway_us bigint NOT NULL,
    queue_us bigint NOT NULL,
    engine_queue_us bigint NOT NULL,
    prefill_us bigint NOT NULL,
    decode_us bigint NOT NULL,
    unattributed_us bigint NOT NULL,
    snapshot_version bigint NOT NULL,
    prompt_tokens integer NOT NULL,
    cached_tokens integer NOT NULL,
    completion_tokens integer NOT NULL,
    status smallint NOT NULL,
    attempts smallint NOT NULL,
    preemptions smallint NOT NULL,
    stream boolean NOT NULL,
    source varchar(10) NOT NULL,
    endpoint varchar(16) NOT NULL,
    model varchar(120) NOT NULL,
    outcome varchar(14) NOT NULL,
    code varchar(64) NOT NULL,
    finish_reason varchar(16) NOT NULL,
    device varchar(64) NOT NULL,
    end_user varchar(16) NOT NULL,
    client_request_id varchar(64) NOT NULL,
    trace_id varchar(32) NOT NULL,
    gateway varchar(64) NOT NULL,
    gateway_version varchar(24) NOT NULL,
    engine_version varchar(40) NOT NULL,
    PRIMARY KEY (started_at, id)
) PARTITION BY RANGE (started_at);

CREATE INDEX requestrecord_id ON telemetry_requestrecord (id);
CREATE INDEX requestrecord_tenant ON telemetry_requestrecord (tenant_id, started_at DESC, id DESC);

CREATE TABLE telemetry_requestdetail (
    id uuid NOT NULL,
    started_at timestamptz NOT NULL,
    body jsonb NOT NULL,
    PRIMARY KEY (started_at, id)
) PARTITION BY RANGE (started_at);
"""

REVERSE = "DROP TABLE telemetry_requestdetail; DROP TABLE telemetry_requestrecord;"


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0001_initial")]
    operations = [migrations.RunSQL(FORWARD, REVERSE)]
