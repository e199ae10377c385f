"""Fixtures of the console's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.fleet_house import House, a_house


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded_servers: None, db: None) -> Iterator[House]:
    """A deployment of the fake worker on a card that holds four of its replicas."""
    with a_house(tmp_path / "workers", monkeypatch) as made:
        yield made
