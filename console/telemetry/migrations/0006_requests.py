"""How many refusals a record stands for."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0005_content")]
    operations = [
        migrations.RunSQL(
            "ALTER TABLE telemetry_requestrecord ADD COLUMN requests integer NOT NULL DEFAULT 1;",
            "ALTER TABLE telemetry_requestrecord DROP COLUMN requests;",
        )
    ]
