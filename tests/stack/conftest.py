"""One whole installation for the session, started through `manage.py up --detach` as a script would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.stack import Stack


@pytest.fixture(scope="session")
def stack(bundled_model: Path) -> Iterator[Stack]:
    made = Stack()
    try:
        made.up()
        made.wait_ready()
        yield made
        made.down()
        assert made.processes() == [], "`down` left processes behind"
    finally:
        made.close()


@pytest.fixture(scope="session")
def key(stack: Stack) -> str:
    return stack.key(name="tests")
