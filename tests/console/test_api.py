"""The JSON API beside the pages: the same actions, errors that name the field, nothing half done."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from console.audit.models import AuditEntry
from console.base.models import User
from console.fleet.models import Route
from console.pricing.models import Price
from tests.console.test_pages import signed_in
from tests.e2e.world import World
from tests.e2e.world import world as world

pytestmark = pytest.mark.django_db


def send(who: User, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, str) else json.dumps(body)
    answer = signed_in(who).post(f"/api/v1/{path}", data, content_type="application/json")
    return answer.status_code, answer.json()


def get(who: User, path: str) -> tuple[int, dict[str, Any]]:
    answer = signed_in(who).get(f"/api/v1/{path}")
    return answer.status_code, answer.json()


def test_a_route_is_made_and_changed_as_a_whole(world: World) -> None:
    status, made = send(
        world.admin,
        "routes",
        {
            "name": "chat",
            "policy": "prefix-aware",
            "targets": [{"deployment": "smollm2", "weight": 90}],
            "fallbacks": [],
        },
    )
    assert status == 200
    assert (made["policy"], made["targets"]) == (
        "prefix-aware", [{"deployment": "smollm2", "weight": 90, "role": "stable"}],
    )  # fmt: skip
    where = f"routes/{made['id']}"
    assert get(world.admin, where) == (200, made)
    assert {route["name"] for route in get(world.admin, "routes")[1]["data"]} == {"chat", "smollm2"}
    status, changed = send(world.admin, where, {"objective_availability": 0.999, "targets": []})
    assert (status, changed["objective_availability"], changed["targets"]) == (200, 0.999, [])
    entries = AuditEntry.objects.filter(target_id=made["id"]).values_list("action", "actor_label", "address")
    assert ("route.set", "admin", "127.0.0.1") in entries


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "chat", "polcy": "x"}, "polcy"),
        ({"name": "chat", "policy": "x"}, "policy"),
        ({"name": ["chat"]}, "name"),
        ({"name": "chat", "targets": [{"deployment": "smollm2", "weight": -1}]}, "targets.weight"),
        ({"name": "chat", "targets": [{"deployment": "nobody"}]}, "targets.deployment"),
        ({"name": "chat", "targets": [{"deployment": "smollm2"}, {"deployment": "smollm2"}]}, "targets.deployment"),
        ({"name": "chat", "targets": "smollm2"}, "targets"),
        ({"name": "chat", "fallbacks": "smollm2"}, "fallbacks"),
        ({"name": "chat", "fallbacks": [{}]}, "fallbacks"),
        ({"name": "chat", "fallbacks": ["\0"]}, "fallbacks"),
        ({"name": "chat", "targets": [{"deployment": "\ud800"}]}, "targets.deployment"),
    ],
)
def test_what_is_wrong_with_a_route_is_named_and_nothing_is_kept(world: World, body: Any, field: str) -> None:
    status, answer = send(world.admin, "routes", body)
    assert (status, answer["error"]["field"]) == (422, field)
    assert answer["error"]["message"]
    assert Route.objects.count() == 1


def test_a_price_keeps_every_digit_of_a_json_number(world: World) -> None:
    body = '{"model": "smollm2", "currency": "USD", "input": 0.150001, "output": "0.6"}'
    status, made = send(world.admin, "prices", body)
    assert (status, made["input"], made["cached_input"], made["version"]) == (200, "0.150001", "0.150001", 1)
    assert Price.objects.get().input == Decimal("0.150001")
    assert get(world.admin, "prices?model=smollm2")[1]["data"] == [made]
    assert get(world.admin, "prices?model=other")[1]["data"] == []
    assert get(world.admin, "prices?model=%00")[0] == 422
    assert send(world.admin, "prices", {"model": "\0", "currency": "USD", "input": 1, "output": 1})[0] == 422


def test_limits_are_read_by_who_sees_them_and_written_by_who_may(world: World) -> None:
    key, tenant = f"keys/{world.key.id}/limits", f"tenants/{world.aurora.id}/limits"
    assert send(world.owner, key, {"requests_per_minute": 5, "budget_day": "1.5"})[1]["budget_day"] == "1.5"
    assert send(world.owner, key, {"requests_per_minute": None})[1]["requests_per_minute"] is None
    for who in (world.member, world.viewer):
        assert get(who, key)[1]["budget_day"] == "1.5"
        assert send(who, key, {"budget_day": None})[0] == 403
    assert send(world.owner, key, {"may_override": True})[0] == 403
    assert send(world.owner, tenant, {"weight": 1000})[0] == 403
    assert send(world.owner, tenant, {"capture_content": True})[1]["capture_content"] is True
    assert send(world.admin, tenant, {"weight": 1000, "budget_total": 8.5})[1]["budget_total"] == "8.5"
    assert send(world.admin, tenant, {"weigth": 1}) == (
        422, {"error": {"message": send(world.admin, tenant, {"weigth": 1})[1]["error"]["message"], "field": "weigth"}},
    )  # fmt: skip


@pytest.mark.parametrize("body", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, "\x00", "\ud800"])
def test_what_is_no_object_is_refused(world: World, body: str) -> None:
    client = signed_in(world.admin)
    data = body.encode("utf-8", "surrogatepass")
    answer = client.post("/api/v1/prices", data, content_type="application/json")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_form_is_no_json_and_other_methods_are_not_possible(world: World) -> None:
    client = signed_in(world.admin)
    assert client.post("/api/v1/prices", {"model": "x"}).status_code == 400
    answer = client.delete("/api/v1/prices")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST")
    assert Client().get("/api/v1/prices").json()["error"]["message"].startswith("Sign in")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from(["routes", "prices"]),
    st.dictionaries(
        st.sampled_from(
            ["name", "policy", "targets", "fallbacks", "sticky", "model", "currency", "input", "output", "x"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
            max_leaves=5,
        ),
    ),
)
def test_no_body_whatever_is_a_fault_of_ours(world: World, path: str, body: dict[str, Any]) -> None:
    status, answer = send(world.admin, path, body)
    assert status in {200, 422}
    assert status == 200 or answer["error"]["message"]
