"""Migration operations for the two triggers of the house, so that no writer (admin, shell, psql) can go round them."""

from __future__ import annotations

from django.db import migrations


def snapshot_trigger(table: str, columns: str = "") -> migrations.RunSQL:
    """Bump and NOTIFY the snapshot version on any write to `table` (or an UPDATE of `columns` only)."""
    of = f"OF {columns}" if columns else ""
    return migrations.RunSQL(
        f"CREATE TRIGGER snapshot_changed AFTER INSERT OR DELETE OR UPDATE {of} ON {table}"
        " FOR EACH STATEMENT EXECUTE FUNCTION fanlight_snapshot_changed();",
        f"DROP TRIGGER snapshot_changed ON {table};",
    )


def append_only(table: str) -> migrations.RunSQL:
    """Refuse UPDATE and DELETE of any row of `table`."""
    return migrations.RunSQL(
        f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON {table}"
        " FOR EACH ROW EXECUTE FUNCTION fanlight_append_only();",
        f"DROP TRIGGER append_only ON {table};",
    )
