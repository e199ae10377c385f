"""Prompts and answers of tenants that keep them, redacted; deleted after the tenant's own number of days."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0004_by_model")]
    operations = [
        migrations.CreateModel(
            name="RequestContent",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("started_at", models.DateTimeField(db_index=True)),
                ("tenant_id", models.UUIDField(db_index=True)),
                ("body", models.JSONField()),
            ],
        ),
    ]
