from django.db import migrations

from console.base.triggers import snapshot_trigger


class Migration(migrations.Migration):
    dependencies = [("tenants", "0001_initial"), ("base", "0002_snapshot_version")]
    operations = [snapshot_trigger("tenants_tenant")]
