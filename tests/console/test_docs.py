"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from console.bounded_http import HEAD_TIMEOUT_S, MAX_HEAD_BYTES
from console.environment import SETTINGS
from console.fleet import placing, reconcile, recycling, rollout
from console.fleet.controller import PRESSED_DRAIN_S
from console.fleet.progress import HUNG_FACTOR, HUNG_FLOOR_S
from console.fleet.reconcile import BACKOFF_S
from console.fleet.stacks import TIMEOUT_S
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


def test_the_numbers_of_the_fleet_are_the_real_ones() -> None:
    fleet = " ".join((ROOT / "docs" / "fleet.md").read_text().split())
    assert f"asked again every {placing.RETRY_S:g} s" in fleet
    load = f"{reconcile.LOAD_TIMEOUT_S:g} s, or a second for each {reconcile.SLOWEST_LOAD // 1_000_000} MB"
    assert f"Loading may take {load} of weights" in fleet
    assert f"({reconcile.DRAIN_S:g} s at most, {PRESSED_DRAIN_S} s for a borrower" in fleet
    *first, last = (f"{wait:g}" for wait in BACKOFF_S)
    assert f"{', '.join(first)}, then {last} s" in fleet
    assert f"{reconcile.SETTLED_S:g} s of service forgive them" in fleet
    assert f"py-spy, {TIMEOUT_S:g} s at most" in fleet
    assert f"after {reconcile.SILENT_S:g} s of silence" in fleet
    assert f"max({HUNG_FLOOR_S:g} s, {HUNG_FACTOR:g} ×" in fleet
    assert f"fails {rollout.FAILURES} times in a row" in fleet
    assert f"finds no room for {rollout.UNPLACED_S:g} s" in fleet
    assert f"after {recycling.WARM_S / 60:g} minutes of service" in fleet


def test_every_setting_is_read_somewhere() -> None:
    """A setting that nothing reads promises what is not there."""
    sources = [*(ROOT / "console").rglob("*.py"), ROOT / "deploy" / "install.sh"]
    text = "\n".join(path.read_text() for path in sources if path.name != "environment.py")
    for setting in SETTINGS:
        assert f'"{setting.name}"' in text or setting.variable in text, setting.variable
