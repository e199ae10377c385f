from django.db import migrations

from console.base.triggers import append_only


class Migration(migrations.Migration):
    dependencies = [("placement", "0001_initial"), ("base", "0002_snapshot_version")]
    operations = [append_only("placement_decision")]
