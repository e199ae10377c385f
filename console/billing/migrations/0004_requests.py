"""How many refusals a line of the ledger stands for."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("billing", "0003_cost")]
    operations = [
        migrations.AddField(
            model_name="usagerecord",
            name="requests",
            field=models.IntegerField(db_default=1),
        )
    ]
