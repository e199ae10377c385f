from django.db import migrations

from console.base.triggers import append_only, snapshot_trigger


class Migration(migrations.Migration):
    dependencies = [("fleet", "0001_initial"), ("base", "0002_snapshot_version")]
    operations = [
        snapshot_trigger("fleet_deployment"),
        snapshot_trigger("fleet_replica", "state, epoch, uds, device, engine_version, facts"),
        snapshot_trigger("fleet_route"),
        snapshot_trigger("fleet_routetarget"),
        append_only("fleet_transition"),
    ]
