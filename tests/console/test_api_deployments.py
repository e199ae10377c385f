"""Deployments over JSON: what the page does, with the same refusals."""

from __future__ import annotations

from typing import Any

import pytest

from console.catalog.models import Model
from tests.console.test_api import get, send
from tests.console.test_pages import signed_in
from tests.e2e.world import World
from tests.e2e.world import world as world

pytestmark = pytest.mark.django_db
TINY: dict[str, Any] = {"name": "tiny", "model": "Tiny", "parameters": {"max_num_seqs": 8}, "desired_replicas": 0}


@pytest.fixture(autouse=True)
def model() -> Model:
    return Model.objects.create(name="Tiny", source="file:tiny", format="gguf", state="ready", context_length=512)


def test_the_whole_life_of_one(world: World) -> None:
    status, made = send(world.admin, "deployments", {**TINY, "min_replicas": 0})
    assert (status, made["revision"], made["parameters"]) == (200, 1, {"max_num_seqs": 8})
    where = f"deployments/{made['id']}"
    assert get(world.admin, where) == (200, made)
    assert "tiny" in [each["name"] for each in get(world.admin, "deployments")[1]["data"]]
    assert send(world.admin, where, {"parameters": {"max_num_seqs": 16}})[1]["revision"] == 2
    assert send(world.admin, f"{where}/rollback", {"revision": 1})[1]["parameters"] == {"max_num_seqs": 8}
    assert send(world.admin, f"{where}/scale", {"replicas": 2})[1]["desired_replicas"] == 2
    assert signed_in(world.admin).delete(f"/api/v1/{where}").status_code == 422
    send(world.admin, f"{where}/scale", {"replicas": 0})
    assert signed_in(world.admin).delete(f"/api/v1/{where}").json() == {"removed": made["id"]}
    assert get(world.admin, where)[0] == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**TINY, "name": "a b"}, "name"),
        ({**TINY, "model": {"$gt": ""}}, "model"),
        ({**TINY, "engine": ["vllm"]}, "engine"),
        ({**TINY, "parameters": [1]}, "parameters"),
        ({**TINY, "parameters": {"max_num_seqs": 1.5}}, "parameters.max_num_seqs"),
        ({**TINY, "parameters": {"max_num_seqs": True}}, "parameters.max_num_seqs"),
        ({**TINY, "schedules": "no"}, "schedules"),
        ({**TINY, "binding": [{"a": 1}]}, "binding"),
        ({**TINY, "route": 5}, "name"),
        ({**TINY, "route": "\u0000"}, "name"),
        ({**TINY, "environment": {"PATH": "/"}}, "environment"),
    ],
)
def test_nonsense_names_its_field(world: World, body: dict[str, Any], field: str) -> None:
    status, answer = send(world.admin, "deployments", body)
    assert (status, answer["error"]["field"]) == (422, field)


@pytest.mark.parametrize("path", ["scale", "rollback"])
def test_only_what_is_meant(world: World, path: str) -> None:
    made = send(world.admin, "deployments", TINY)[1]
    assert send(world.admin, f"deployments/{made['id']}/{path}", {"replicas": 1, "revision": 1})[0] == 422
    assert send(world.admin, f"deployments/{made['id']}/{path}", {})[0] == 422


def test_members_get_nothing(world: World) -> None:
    made = send(world.admin, "deployments", TINY)[1]
    for path in ("deployments", f"deployments/{made['id']}"):
        assert get(world.member, path)[0] == 403
        assert send(world.member, path, {"name": "x"})[0] == 403
    assert signed_in(world.member).delete(f"/api/v1/deployments/{made['id']}").status_code == 403
