"""Routes: rules, weighted targets with roles, fallbacks in order."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from console.audit.actions import COMMAND_LINE
from console.audit.models import AuditEntry
from console.base.models import SnapshotVersion
from console.catalog.models import Model
from console.errors import NotAllowed, Refused
from console.fleet.models import Deployment, Route
from console.fleet.route_actions import create_route, remove_target, set_fallbacks, set_route, set_target
from console.fleet.route_facts import route_facts
from console.tenants.actions import create_tenant
from console.tenants.models import Membership
from tests.console.test_key_actions import person

pytestmark = pytest.mark.django_db


@pytest.fixture
def deployments() -> list[Deployment]:
    model = Model.objects.create(name="Tiny", source="file:tiny")
    return [Deployment.objects.create(name=name, model=model) for name in ("a", "b", "c")]


@pytest.fixture
def route() -> Route:
    return create_route(COMMAND_LINE, "chat")


def actions() -> list[str]:
    return list(AuditEntry.objects.order_by("id").values_list("action", flat=True))


@pytest.fixture
def quantised(deployments: list[Deployment]) -> Deployment:
    deployments[1].quantisation = "int8"
    deployments[1].save()
    return deployments[1]


def test_what_is_not_evaluated_gets_five_percent(
    route: Route, deployments: list[Deployment], quantised: Deployment
) -> None:
    with pytest.raises(Refused, match="not evaluated: it may take 5% of chat, and would take 100%"):
        set_target(COMMAND_LINE, route, quantised, {})
    assert not route.targets.exists()
    set_target(COMMAND_LINE, route, deployments[0], {"weight": 95})
    set_target(COMMAND_LINE, route, quantised, {"weight": 5})
    with pytest.raises(Refused, match="would take 6%"):
        set_target(COMMAND_LINE, route, quantised, {"weight": 6})
    with pytest.raises(Refused, match="would take 100%"):
        remove_target(COMMAND_LINE, route, deployments[0])
    assert route.targets.count() == 2
    set_target(COMMAND_LINE, route, quantised, {"weight": 50, "unevaluated": "yes"})
    details = AuditEntry.objects.order_by("-id")[0].details
    assert details == {"deployment": "b", "weight": [5, 50], "unevaluated": [False, True]}
    assert route_facts(route)["targets"][1] == {"deployment": "b", "weight": 50, "role": "stable", "unevaluated": True}


def test_an_evaluated_one_gets_any_share(route: Route, quantised: Deployment) -> None:
    quantised.evaluated = True
    quantised.save()
    set_target(COMMAND_LINE, route, quantised, {})


def test_a_shadow_of_what_is_not_evaluated_serves_nobody(route: Route, quantised: Deployment) -> None:
    set_target(COMMAND_LINE, route, quantised, {"role": "shadow", "weight": 100})


def test_targets_have_weights_and_roles(route: Route, deployments: list[Deployment]) -> None:
    a, b, _c = deployments
    set_target(COMMAND_LINE, route, a, {})
    set_target(COMMAND_LINE, route, b, {"weight": "10", "role": "canary"})
    before = SnapshotVersion.objects.get().version
    set_target(COMMAND_LINE, route, b, {"weight": 25})
    assert SnapshotVersion.objects.get().version == before + 1
    set_target(COMMAND_LINE, route, b, {"weight": 25})
    assert SnapshotVersion.objects.get().version == before + 1
    assert route_facts(route)["targets"] == [
        {"deployment": "a", "weight": 100, "role": "stable"}, {"deployment": "b", "weight": 25, "role": "canary"},
    ]  # fmt: skip
    assert AuditEntry.objects.order_by("-id")[0].details == {"deployment": "b", "weight": [10, 25]}
    remove_target(COMMAND_LINE, route, b)
    with pytest.raises(Refused, match="no target"):
        remove_target(COMMAND_LINE, route, b)
    assert actions() == ["route.create", *["route.target"] * 4]


def test_a_shadow_gets_a_share_of_the_requests(route: Route, deployments: list[Deployment]) -> None:
    a = deployments[0]
    assert set_target(COMMAND_LINE, route, a, {"role": "shadow", "weight": 100}).role == "shadow"
    with pytest.raises(Refused, match="percent") as caught:
        set_target(COMMAND_LINE, route, a, {"weight": 101})
    assert caught.value.field == "weight"
    set_target(COMMAND_LINE, route, a, {"role": "stable", "weight": 101})
    with pytest.raises(Refused, match="percent"):
        set_target(COMMAND_LINE, route, a, {"role": "shadow"})


def test_fallbacks_keep_their_order(route: Route, deployments: list[Deployment]) -> None:
    set_fallbacks(COMMAND_LINE, route, ["c", "a"])
    set_fallbacks(COMMAND_LINE, route, ["c", "a"])
    assert route_facts(route)["fallbacks"] == ["c", "a"]
    set_fallbacks(COMMAND_LINE, route, ["a"])
    assert actions() == ["route.create", "route.fallbacks", "route.fallbacks"]
    for wrong in (["a", "a"], ["a", "nobody"]):
        with pytest.raises(Refused) as caught:
            set_fallbacks(COMMAND_LINE, route, wrong)
        assert caught.value.field == "fallbacks"
    assert route_facts(route)["fallbacks"] == ["a"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"policy": "fastest"}, "policy"), ({"max_attempts": 0}, "max_attempts"),
        ({"queue_timeout_s": -1}, "queue_timeout_s"),
        ({"objective_availability": 1.5}, "objective_availability"), ({"name": "x"}, "name"), ({"sticky": 3}, "sticky"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_used_names_its_field(route: Route, values: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as caught:
        set_route(COMMAND_LINE, route, values)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["", " x", "a b", "/x", "x" * 121, "ä"])
def test_a_public_name_is_plain(name: str) -> None:
    with pytest.raises(Refused):
        create_route(COMMAND_LINE, name)


def test_a_name_is_given_once(route: Route) -> None:
    with pytest.raises(Refused, match="already"):
        create_route(COMMAND_LINE, "chat")


def test_only_admins_change_routes(route: Route, deployments: list[Deployment]) -> None:
    owner = person("olga", create_tenant(COMMAND_LINE, "aurora"), Membership.Role.OWNER)
    for act in (
        lambda: create_route(owner, "mine"),
        lambda: set_route(owner, route, {"sticky": False}),
        lambda: set_target(owner, route, deployments[0], {}),
        lambda: remove_target(owner, route, deployments[0]),
        lambda: set_fallbacks(owner, route, []),
    ):
        with pytest.raises(NotAllowed):
            act()


def test_routes_by_command(deployments: list[Deployment]) -> None:
    def told(*arguments: str) -> Any:
        out = StringIO()
        call_command("route", *arguments, "--json", stdout=out)
        return json.loads(out.getvalue())

    made = told("create", "chat", "--deployment", "a", "--policy", "prefix-aware", "--fallback", "c", "--fallback", "b")
    assert (made["policy"], made["fallbacks"], made["targets"][0]["deployment"]) == ("prefix-aware", ["c", "b"], "a")
    assert told("set", "chat", "--objective-ttft-p99-ms", "500", "--hedge-after-s", "0.5")["hedge_after_s"] == 0.5
    assert told("set", "chat", "--hedge-after-s", "none", "--fallback", "none")["hedge_after_s"] is None
    assert told("target", "chat", "b", "--weight", "5", "--role", "canary")["targets"][1]["weight"] == 5
    assert len(told("target", "chat", "b", "--remove")["targets"]) == 1
    assert told("show", "chat") == told("list")
    with pytest.raises(CommandError, match="no route named x"):
        told("show", "x")
    with pytest.raises(CommandError, match="no deployment named x"):
        told("create", "other", "--deployment", "x")
    assert not Route.objects.filter(name="other").exists()  # all or nothing
