"""Lenders keep a floor; those of before lend nothing more until they are placed anew."""

from __future__ import annotations

from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def keep_all(apps: Apps, _schema: BaseDatabaseSchemaEditor) -> None:
    lenders = apps.get_model("placement", "Reservation").objects.filter(lends=True)
    lenders.update(floor_bytes=models.F("reserved_bytes"))


class Migration(migrations.Migration):
    dependencies = [("placement", "0004_minute_index")]
    operations = [
        migrations.AddField("reservation", "floor_bytes", models.BigIntegerField(db_default=0, default=0)),
        migrations.RunPython(keep_all, migrations.RunPython.noop),
    ]
