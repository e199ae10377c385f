"""The counter behind every gateway's Snapshot, and the function that snapshot tables' triggers call."""

from django.db import migrations

FORWARD = """
INSERT INTO base_snapshotversion (id, version) VALUES (1, 1);

CREATE FUNCTION fanlight_snapshot_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    now_at bigint;
BEGIN
    INSERT INTO base_snapshotversion (id, version) VALUES (1, 1)
        ON CONFLICT (id) DO UPDATE SET version = base_snapshotversion.version + 1 RETURNING version INTO now_at;
    PERFORM pg_notify('fanlight_snapshot', now_at::text);
    RETURN NULL;
END $$;

CREATE FUNCTION fanlight_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
"""

REVERSE = """
DROP FUNCTION fanlight_append_only();
DROP FUNCTION fanlight_snapshot_changed();
DELETE FROM base_snapshotversion;
"""


class Migration(migrations.Migration):
    dependencies = [("base", "0001_initial")]
    operations = [migrations.RunSQL(FORWARD, REVERSE)]
