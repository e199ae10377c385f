from django.db import migrations

from console.base.triggers import snapshot_trigger


class Migration(migrations.Migration):
    dependencies = [("fleet", "0003_routing"), ("base", "0002_snapshot_version")]
    operations = [snapshot_trigger("fleet_routefallback"), snapshot_trigger("fleet_endpoint")]
