"""Readiness of engines that write no file: asked beside the loop, and told as often as somebody wants to know."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from console.catalog.models import Model
from console.fleet import probe
from console.fleet.models import Deployment, Replica
from console.fleet.verifying import Readiness

pytestmark = pytest.mark.django_db(transaction=True)
FACTS = {"model": "tiny", "max_num_seqs": 8, "engine_version": "0.32.0"}


@pytest.fixture
def replica() -> Replica:
    model = Model.objects.create(name="Tiny", source="file:tiny", format="safetensors")
    deployment = Deployment.objects.create(name="tiny", model=model, engine="vllm")
    return Replica.objects.create(id=uuid.uuid4(), deployment=deployment, ordinal=1, epoch=1, uds="/nowhere")


def until_told(readiness: Readiness, replica: Replica) -> dict[str, Any]:
    for _question in range(500):
        found = readiness.facts(replica, {})
        if found:
            return found
        for each in readiness._asking.values():
            each.join(5)
    raise AssertionError("it was never told")


def test_facts_are_told_until_the_row_has_them(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ready", lambda *_asked: dict(FACTS))
    readiness = Readiness()
    assert readiness.facts(replica, {}) == {}  # it is being asked
    told = until_told(readiness, replica)
    told["socket"] = [1, 2]  # what the row gets besides
    assert readiness.facts(replica, {}) == FACTS
    replica.facts = told
    assert readiness.facts(replica, {}) == told
    replica.epoch, replica.facts = 2, {}
    assert readiness.facts(replica, {}) == {}  # another launch is asked anew
    assert until_told(readiness, replica) == FACTS


def test_one_that_loads_is_asked_again(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, None, dict(FACTS)])
    monkeypatch.setattr(probe, "ready", lambda *_asked: next(answers))
    monkeypatch.setattr("console.fleet.verifying.ASK_S", 0.0)
    assert until_told(Readiness(), replica) == FACTS
