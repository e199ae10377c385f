"""Spans that engines tell of requests by OTLP; partitioned by day like the details beside them."""

from django.db import migrations, models

FORWARD = """
CREATE TABLE telemetry_enginespan (
    request_id uuid NOT NULL,
    started_at timestamptz NOT NULL,
    span_id varchar(16) NOT NULL,
    parent_id varchar(16) NOT NULL,
    name varchar(80) NOT NULL,
    service varchar(80) NOT NULL,
    begun_ns bigint NOT NULL,
    ended_ns bigint NOT NULL,
    attributes jsonb NOT NULL,
    PRIMARY KEY (started_at, request_id, span_id)
) PARTITION BY RANGE (started_at);
"""


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0006_requests")]
    operations = [
        migrations.RunSQL(FORWARD, "DROP TABLE telemetry_enginespan"),
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="EngineSpan",
                    fields=[
                        ("span_id", models.CharField(max_length=16, primary_key=True, serialize=False)),
                        ("request_id", models.UUIDField()),
                        ("started_at", models.DateTimeField()),
                        ("parent_id", models.CharField(max_length=16)),
                        ("name", models.CharField(max_length=80)),
                        ("service", models.CharField(max_length=80)),
                        ("begun_ns", models.BigIntegerField()),
                        ("ended_ns", models.BigIntegerField()),
                        ("attributes", models.JSONField()),
                    ],
                    options={"db_table": "telemetry_enginespan", "managed": False},
                )
            ]
        ),
    ]
