"""What a request cost, which target it went to, and how often it had been sent before."""

from django.db import migrations

FORWARD = """
ALTER TABLE telemetry_requestrecord
    ADD COLUMN role varchar(8) NOT NULL DEFAULT '',
    ADD COLUMN retries smallint NOT NULL DEFAULT 0,
    ADD COLUMN currency varchar(3) NOT NULL DEFAULT '',
    ADD COLUMN cost numeric(24, 9) NOT NULL DEFAULT 0;
"""

REVERSE = """
ALTER TABLE telemetry_requestrecord DROP COLUMN role, DROP COLUMN retries, DROP COLUMN currency, DROP COLUMN cost;
"""


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0002_partitioned")]
    operations = [migrations.RunSQL(FORWARD, REVERSE)]
