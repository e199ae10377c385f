"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from console.bounded_http import HEAD_TIMEOUT_S, MAX_HEAD_BYTES
from console.environment import SETTINGS
from console.fleet.reconcile import BACKOFF_S
from console.supervisor.bootstrap import KEPT_BACKUPS
from console.supervisor.child import _BACKOFF_S
from serving.journal import MAX_UNWRITTEN
from serving.port import GatewaySettings
from serving.shipper import REFUSED
from serving.telemetry import names

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def test_every_metric_and_setting_of_the_runbook_exists() -> None:
    known = set(names.METRICS)
    assert set(re.findall(r"\bfanlight_[a-z_]+", OPERATIONS)) <= known
    assert set(re.findall(r"\bFANLIGHT_[A-Z_]+", OPERATIONS)) <= {setting.variable for setting in SETTINGS}
    assert f"`journal/{REFUSED}`" in OPERATIONS
    codes = set(re.findall(r"503 `([a-z_]+)`", OPERATIONS))
    assert codes
    assert codes <= set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "gateway.md").read_text()))


def test_the_waits_of_the_runbook_are_the_real_ones() -> None:
    def listed(waits: tuple[float, ...]) -> str:
        *first, last = (f"{wait:g}" for wait in waits)
        return f"{', '.join(first)}, then every {last} s"

    assert listed(BACKOFF_S) in OPERATIONS
    assert listed(_BACKOFF_S) in OPERATIONS


def test_the_bounds_of_the_runbook_are_the_real_ones() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(GatewaySettings)}
    assert f"| {defaults['max_in_flight']} per gateway |" in OPERATIONS
    assert f"| {defaults['unsent_bytes_limit'] // 1_000_000} MB |" in OPERATIONS
    assert f"{MAX_HEAD_BYTES // 1024} KiB, {HEAD_TIMEOUT_S:g} s for a head" in OPERATIONS
    assert f"| {MAX_UNWRITTEN:,} records of refused requests" in OPERATIONS
    assert f"the newest {('zero', 'one', 'two', 'three', 'four', 'five')[KEPT_BACKUPS]}" in OPERATIONS


def test_every_setting_is_read_somewhere() -> None:
    """A setting that nothing reads promises what is not there."""
    sources = [*(ROOT / "console").rglob("*.py"), ROOT / "deploy" / "install.sh"]
    text = "\n".join(path.read_text() for path in sources if path.name != "environment.py")
    for setting in SETTINGS:
        assert f'"{setting.name}"' in text or setting.variable in text, setting.variable
