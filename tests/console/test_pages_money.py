"""Pages of routes, prices and limits: what they show, who may change it, and in which words a refusal comes."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import msgspec
import pytest
from django.conf import settings
from django.utils import timezone

from console import coordination
from console.audit.actions import COMMAND_LINE
from console.audit.models import AuditEntry
from console.fleet.models import Route
from console.keys.actions import set_key_limits
from console.keys.queries import budget_windows
from console.pricing.actions import set_price
from console.pricing.models import Price
from console.tenants.actions import set_limits
from serving.port import Settled
from tests.console.test_pages import signed_in
from tests.e2e.world import World, deliver, settled
from tests.e2e.world import world as world

pytestmark = pytest.mark.django_db


@pytest.fixture
def route(world: World) -> Route:
    return Route.objects.get()


def billed(world: World, cost: int, **record: object) -> Settled:
    one = settled(world.aurora, world.key, world.replica, currency="USD", cost=cost, **record)
    return msgspec.structs.replace(
        one, usage=msgspec.structs.replace(one.usage, currency="USD", cost=cost, price_version=1)
    )


def test_a_route_is_made_given_rules_targets_and_a_price_by_its_forms(world: World) -> None:
    client = signed_in(world.admin)
    assert client.post("/routes/create/", {"name": "chat", "deployment": "smollm2"}).status_code == 302
    route = Route.objects.get(name="chat")
    page = f"/routes/{route.id}/"
    rules = {
        "policy": "load-aware",
        "sticky": "no",
        "hedge_after_s": "0.25",
        "objective_ttft_p99_ms": "500",
        "fallbacks": "smollm2",
    }
    assert client.post(f"{page}rules/", rules).status_code == 302
    client.post(f"{page}target/", {"deployment": "smollm2", "weight": "7", "role": "canary"})
    client.post(
        f"{page}price/", {"currency": "USD", "input": "0.15", "cached_input": "", "output": "0.6", "effective_at": ""}
    )
    text = client.get(page).content.decode()
    route.refresh_from_db()
    assert (route.policy, route.sticky, route.hedge_after_s) == ("load-aware", False, 0.25)
    assert (route.targets.get().weight, route.fallbacks.get().deployment.name) == (7, "smollm2")
    assert Price.objects.get().cached_input == Decimal("0.15")
    for seen in ("USD v1", "0.15", "0.6", "in force", "Canary", "objective 500"):
        assert seen in text
    listed = client.get("/routes/").content.decode()
    assert "chat" in listed and "Load-aware" in listed
    client.post(f"{page}target/", {"deployment": "smollm2", "remove": "1"})
    assert not route.targets.exists()
    assert set(AuditEntry.objects.filter(actor=world.admin).values_list("action", flat=True)) >= {
        "route.create", "route.set", "route.fallbacks", "route.target", "price.set",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("form", "values", "told"),
    [
        ("rules", {"max_attempts": "99"}, "max_attempts must be"),
        ("rules", {"max_attempts": "2", "fallbacks": "nobody"}, "no deployment named nobody"),
        ("target", {"deployment": "nobody"}, "no deployment named nobody"),
        ("target", {"deployment": "smollm2", "weight": "many"}, "weight must be"),
        ("price", {"currency": "USD", "input": "-1", "output": "1"}, "input must be"),
        ("price", {"currency": "USD", "input": "1", "output": "1", "effective_at": "2001-01-01T00:00"}, "in the past"),
        ("price", {"currency": "USD", "input": "1", "output": "1", "effective_at": "soon"}, "ISO 8601"),
        ("price", {"currency": "USD", "input": "1", "output": "1", "effective_at": "2001-99-01T00:00"}, "ISO 8601"),
    ],
)
def test_what_a_form_got_wrong_is_told_and_nothing_changes(
    world: World, route: Route, form: str, values: dict[str, str], told: str
) -> None:
    answer = signed_in(world.admin).post(f"/routes/{route.id}/{form}/", values, follow=True)
    assert told in answer.content.decode()
    route.refresh_from_db()
    assert route.max_attempts == 3
    assert not Price.objects.exists()


def test_a_planned_price_is_in_the_viewers_zone(world: World, route: Route) -> None:
    world.admin.time_zone = "Asia/Tokyo"
    world.admin.save()
    at = (timezone.now() + timedelta(days=400)).strftime("%Y-%m-%dT09:00")
    signed_in(world.admin).post(
        f"/routes/{route.id}/price/", {"currency": "USD", "input": "1", "output": "1", "effective_at": at}
    )
    assert Price.objects.get().effective_at.hour == 0  # nine in Tokyo


def test_limits_are_shown_with_what_gateways_count(world: World) -> None:
    key = set_key_limits(COMMAND_LINE, world.key, {"requests_per_minute": 600, "budget_total": 2})
    set_limits(COMMAND_LINE, world.aurora, {"budget_total": 100})
    (window,) = budget_windows(key).values()
    assert coordination.correct(window.name, 0, 750_000_001)
    for who in (world.owner, world.viewer):
        text = signed_in(who).get(f"/keys/{world.key.id}/").content.decode()
        assert "use unknown" not in text
        assert "0.750000001" in text and "38 %" in text


def test_without_valkey_the_ledger_tells_what_is_spent_and_the_rest_is_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_key_limits(COMMAND_LINE, world.key, {"requests_per_minute": 600, "budget_total": 2, "budget_day": 1})
    set_limits(COMMAND_LINE, world.aurora, {"budget_month": 100})
    deliver(billed(world, 500_000_000), billed(world, 250_000_001))
    monkeypatch.setattr(settings, "VALKEY_URL", "unix:///nowhere/valkey.sock")
    text = signed_in(world.viewer).get(f"/keys/{world.key.id}/").content.decode()
    assert "use unknown" in text
    assert text.count("0.750000001") == 3
    assert "0.750000001" in signed_in(world.viewer).get("/keys/").content.decode()


def test_owners_change_a_keys_limits_and_viewers_have_no_form(world: World) -> None:
    page = f"/keys/{world.key.id}/"
    values = {"requests_per_minute": "60", "budget_day": "1.50", "concurrency": "", "priority": "low"}
    assert f"{page}limits/" not in signed_in(world.viewer).get(page).content.decode()
    signed_in(world.viewer).post(f"{page}limits/", values)
    world.key.refresh_from_db()
    assert world.key.requests_per_minute is None
    text = signed_in(world.owner).post(f"{page}limits/", values, follow=True).content.decode()
    world.key.refresh_from_db()
    assert (world.key.requests_per_minute, world.key.budget_day, world.key.concurrency) == (60, Decimal("1.5"), None)
    assert "may_override" not in text
    refused = signed_in(world.owner).post(f"{page}limits/", {"may_override": "yes"}, follow=True).content.decode()
    assert "Only platform admins" in refused
    signed_in(world.admin).post(f"{page}limits/", {"may_override": "yes"})
    world.key.refresh_from_db()
    assert world.key.may_override


def test_admins_change_a_tenants_limits_by_its_form(world: World) -> None:
    client = signed_in(world.admin)
    values = {"budget_month": "750", "weight": "200", "priority": "high"}
    text = client.post("/tenants/aurora/limits/", values, follow=True).content.decode()
    world.aurora.refresh_from_db()
    assert (world.aurora.budget_month, world.aurora.weight, world.aurora.priority) == (750, 200, "high")
    assert "750.00" in text
    assert "weight must be" in client.post("/tenants/aurora/limits/", {"weight": "0"}, follow=True).content.decode()


def test_a_request_shows_its_cost_line_by_line_its_target_and_its_retries(world: World, route: Route) -> None:
    set_price(
        COMMAND_LINE, {"model": "smollm2", "currency": "USD", "input": "0.15", "cached_input": "0.05", "output": "0.6"}
    )
    cost = (32 * 150_000 + 32 * 50_000 + 12 * 600_000) // 1000  # nano-units
    (billed_id,) = deliver(billed(world, cost, role="canary", retries=2))
    (free_id,) = deliver(settled(world.aurora, world.key, world.replica))
    client = signed_in(world.viewer)
    text = client.get(f"/requests/{billed_id}/").content.decode()
    for seen in ("price version 1", "0.0000136", "0.0000048", "0.0000016", "0.0000072", "canary", "2 times"):
        assert seen in text
    assert "It cost nothing" in client.get(f"/requests/{free_id}/").content.decode()
    listed = client.get("/requests/").content.decode()
    assert "0.0000136" in listed and "canary" in listed and "×3" in listed
    exported = b"".join(client.get("/requests/export.csv").streaming_content).decode()
    assert "canary,2,USD,0.0000136" in exported
    assert billed_id in client.get("/requests/?q=role:canary+retries>1").content.decode()
    assert billed_id not in client.get("/requests/?q=role:stable").content.decode()
