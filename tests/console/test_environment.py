"""The settings table: what is refused, and how the refusal reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from console import environment
from console.base.management.commands import settings_table
from console.environment import ROOT
from console.version import version


def test_defaults_load_from_an_empty_environment() -> None:
    values = environment.load({})
    assert values["PORT"] == 8000
    assert values["BIND"] == "127.0.0.1"
    assert set(values) == {setting.name for setting in environment.SETTINGS}


def test_an_unknown_variable_stops_the_start_and_is_named() -> None:
    with pytest.raises(environment.BadSettings, match="FANLIGHT_PROT is not a setting"):
        environment.load({"FANLIGHT_PROT": "8001"})


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(environment.BadSettings) as caught:
        environment.load({"FANLIGHT_PORT": "0", "FANLIGHT_LOG_LEVEL": "LOUD", "FANLIGHT_NOPE": "1"})
    assert all(name in str(caught.value) for name in ("FANLIGHT_PORT", "FANLIGHT_LOG_LEVEL", "FANLIGHT_NOPE"))


def test_a_secret_is_not_repeated_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_text: str) -> str:
        raise ValueError("cannot be used")

    setting = environment.Setting("TOKEN", "text", "", "", refuse, secret=True)
    monkeypatch.setattr(environment, "SETTINGS", (setting,))
    with pytest.raises(environment.BadSettings) as caught:
        environment.load({"FANLIGHT_TOKEN": "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "delays"),
    [
        ("", {}),
        ("prefill=50", {"prefill": 0.05}),
        ("auth=1,decode=2.5", {"auth": 0.001, "decode": 0.0025}),
    ],
)
def test_fault_delays_are_milliseconds(text: str, delays: dict[str, float]) -> None:
    assert environment.load({"FANLIGHT_FAULT_DELAYS": text})["FAULT_DELAYS"] == delays


def test_every_setting_is_in_the_generated_document() -> None:
    text = settings_table.render()
    assert all(f"`{setting.variable}`" in text for setting in environment.SETTINGS)
    assert settings_table.DOCUMENT.read_text() == text


def test_version_is_fanlights_and_not_djangos() -> None:
    answer = subprocess.run(
        [sys.executable, "manage.py", "version", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout)["fanlight"] == version()
