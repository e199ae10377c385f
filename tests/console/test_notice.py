"""The overview says when this process's gateway counts limits by itself, and says nothing else of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.utils import translation

from console import contract
from console.dashboards import overview
from tests.console.test_pages import signed_in
from tests.e2e.world import World, forget
from tests.e2e.world import world as world

WORDS = "this gateway counts limits by itself"


def gateway(monkeypatch: pytest.MonkeyPatch, *, alone: bool) -> None:
    monkeypatch.setattr(contract, "_serving", SimpleNamespace(gateway=SimpleNamespace(alone=alone)))
    forget()


@pytest.mark.parametrize("who", ["admin", "viewer"])
def test_the_overview_tells_while_valkey_is_away(world: World, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    client = signed_in(getattr(world, who))
    assert WORDS not in client.get("/").content.decode()
    gateway(monkeypatch, alone=True)
    assert WORDS in client.get("/").content.decode()
    gateway(monkeypatch, alone=False)
    assert WORDS not in client.get("/").content.decode()


def test_the_live_part_follows_in_the_viewers_language(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = overview.Scope(None)
    gateway(monkeypatch, alone=True)
    with translation.override("zh-hans"):
        assert "Valkey 无响应" in overview.render(overview.take(everything, "1h"))["notice"]
    gateway(monkeypatch, alone=False)
    assert overview.render(overview.take(everything, "1h"))["notice"].strip() == ""
