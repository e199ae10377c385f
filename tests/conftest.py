"""Fixtures of every suite: the real embedded PostgreSQL and Valkey, and the bundled model."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def embedded_servers() -> Iterator[None]:
    """The real PostgreSQL and Valkey, as `manage.py up` starts them, in the tests' own data folder."""
    from django.conf import settings

    from console import embedded

    layout = settings.LAYOUT
    layout.create()
    commands = [
        embedded.prepare_postgres(layout, lambda _line: None),
        embedded.prepare_valkey(layout),
    ]
    running = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command.argv,
                    env=command.env,
                    cwd="/",
                    start_new_session=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    **embedded.run_as_server_user(),
                )
            )
        embedded.wait_for_postgres(layout, lambda: running[0].poll() is None)
        embedded.wait_for_valkey(layout, lambda: running[1].poll() is None)
        yield
    finally:
        for process, command in zip(running, commands, strict=False):
            process.send_signal(command.stop_signal)
        for process in running:
            process.wait(timeout=30)


@pytest.fixture(scope="session")
def django_db_modify_db_settings(embedded_servers: None) -> None:
    """pytest-django makes its test database once the servers are there."""


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """Path of the bundled model's GGUF: FANLIGHT_TEST_MODEL, or fetched once into .cache/ and checked."""
    from console.catalog import sources

    given = os.environ.get("FANLIGHT_TEST_MODEL")
    if given:
        return Path(given)
    return sources.fetch(sources.BUNDLED, ROOT / ".cache" / "models", lambda _line: None)
