"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

from console.environment import SETTINGS
from console.fleet.reconcile import BACKOFF_S
from console.supervisor.child import _BACKOFF_S
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


def test_every_setting_is_read_somewhere() -> None:
    """A setting that nothing reads promises what is not there."""
    sources = [*(ROOT / "console").rglob("*.py"), ROOT / "deploy" / "install.sh"]
    text = "\n".join(path.read_text() for path in sources if path.name != "environment.py")
    for setting in SETTINGS:
        assert f'"{setting.name}"' in text or setting.variable in text, setting.variable
