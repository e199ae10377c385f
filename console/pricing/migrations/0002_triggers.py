from django.db import migrations

from console.base.triggers import append_only, snapshot_trigger


class Migration(migrations.Migration):
    dependencies = [("pricing", "0001_initial"), ("base", "0002_snapshot_version")]
    operations = [snapshot_trigger("pricing_price"), append_only("pricing_price")]
