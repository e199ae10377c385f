"""The newest requests of a route: its objectives and its canaries are judged by them."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0003_money")]
    operations = [
        migrations.RunSQL(
            "CREATE INDEX requestrecord_model ON telemetry_requestrecord (model, started_at DESC, id DESC);",
            "DROP INDEX requestrecord_model;",
        )
    ]
