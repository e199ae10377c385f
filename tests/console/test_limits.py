"""Limits of tenants and keys: who may set them, what is written down, and what gateways get of them."""

from __future__ import annotations

import json
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from console import contract
from console.audit.actions import COMMAND_LINE, Actor
from console.audit.models import AuditEntry
from console.base.models import SnapshotVersion
from console.errors import NotAllowed, Refused
from console.keys.actions import create_key, set_key_limits
from console.keys.models import APIKey
from console.tenants.actions import create_tenant, set_limits
from console.tenants.limits import limits_of, lower
from console.tenants.models import Membership, Tenant
from serving.port import PRIORITIES, Budget, Limits
from tests.console.test_key_actions import person

pytestmark = pytest.mark.django_db


@pytest.fixture
def tenant() -> Tenant:
    return create_tenant(COMMAND_LINE, "aurora", currency="EUR", billing_zone="Europe/Stockholm")


def told(*arguments: str) -> Any:
    out = StringIO()
    call_command(*arguments, "--json", stdout=out)
    return json.loads(out.getvalue())


def newest_entry() -> AuditEntry:
    return AuditEntry.objects.order_by("-id")[0]


def test_limits_are_set_audited_and_bump_the_snapshot_once(tenant: Tenant) -> None:
    before = SnapshotVersion.objects.get().version
    set_limits(COMMAND_LINE, tenant, {"requests_per_minute": 60, "budget_day": "25.50", "weight": 300})
    assert SnapshotVersion.objects.get().version == before + 1
    entry = newest_entry()
    assert (entry.action, entry.tenant_id) == ("tenant.limits", tenant.id)
    assert entry.details == {"requests_per_minute": [None, 60], "budget_day": [None, "25.5"], "weight": [100, 300]}
    set_limits(COMMAND_LINE, tenant, {"requests_per_minute": "60"})
    assert newest_entry() == entry
    tenant.refresh_from_db()
    assert tenant.limits() == Limits(requests_per_minute=60, budgets=(Budget("day", 25_500_000_000),))


@pytest.mark.parametrize("role", [Membership.Role.OWNER, Membership.Role.MEMBER, Membership.Role.VIEWER, None])
def test_only_admins_set_a_tenants_limits(tenant: Tenant, role: str | None) -> None:
    actor = person("pat", tenant if role else None, role or Membership.Role.MEMBER)
    with pytest.raises(NotAllowed):
        set_limits(actor, tenant, {"budget_day": None})
    with pytest.raises(NotAllowed):
        set_limits(actor, tenant, {"capture_content": True, "weight": 10_000})


def test_whether_contents_are_kept_is_for_the_tenants_owners_too(tenant: Tenant) -> None:
    owner, member = person("olga", tenant, Membership.Role.OWNER), person("mario", tenant)
    assert set_limits(owner, tenant, {"capture_content": "yes", "capture_days": 3}).capture_content
    assert newest_entry().actor_label == "olga"
    with pytest.raises(NotAllowed):
        set_limits(member, tenant, {"capture_content": "no"})


@pytest.mark.parametrize(
    ("role", "may"), [(Membership.Role.OWNER, True), (Membership.Role.MEMBER, False), (Membership.Role.VIEWER, False)]
)
def test_owners_limit_their_keys(tenant: Tenant, role: str, may: bool) -> None:
    key = create_key(COMMAND_LINE, tenant, "bot").key
    actor = person("pat", tenant, role)
    if not may:
        with pytest.raises(NotAllowed):
            set_key_limits(actor, key, {"concurrency": 4})
        return
    assert set_key_limits(actor, key, {"concurrency": 4, "priority": "low"}).concurrency == 4
    assert newest_entry().details == {"concurrency": [None, 4], "priority": ["", "low"]}


def test_only_admins_let_a_key_override(tenant: Tenant) -> None:
    owner = person("olga", tenant, Membership.Role.OWNER)
    key = create_key(COMMAND_LINE, tenant, "bot").key
    for value in (True, False):
        with pytest.raises(NotAllowed):
            set_key_limits(owner, key, {"may_override": value})
        with pytest.raises(NotAllowed):
            create_key(owner, tenant, "mine", limits={"may_override": value})
    assert set_key_limits(COMMAND_LINE, key, {"may_override": True}).may_override
    assert APIKey.objects.count() == 1


def test_a_bad_limit_makes_no_key(tenant: Tenant) -> None:
    with pytest.raises(Refused) as caught:
        create_key(COMMAND_LINE, tenant, "bot", limits={"budget_day": "9000001"})
    assert caught.value.field == "budget_day"
    with pytest.raises(Refused, match="weight is not a field"):
        create_key(COMMAND_LINE, tenant, "bot", limits={"weight": 1})
    assert not APIKey.objects.exists()


def test_a_key_is_never_served_before_its_tenants_class() -> None:
    for own in ("", *PRIORITIES):
        for tenants in PRIORITIES:
            served = lower(own, tenants)
            assert PRIORITIES.index(served) >= PRIORITIES.index(tenants)
            assert served in {own, tenants}


def test_money_keeps_every_digit_on_the_way_to_gateways() -> None:
    row: dict[str, Any] = {
        f"k_{name}": None for name in (*Limits.__struct_fields__, "budget_hour", "budget_day", "budget_month")
    }
    row["k_budget_total"] = Decimal("8999999.999999999")
    assert limits_of(row, "k_").budgets == (Budget("total", 8_999_999_999_999_999),)


def test_the_playground_is_bound_by_the_same_limits(tenant: Tenant) -> None:
    set_limits(COMMAND_LINE, tenant, {"concurrency": 2, "priority": "low", "weight": 7})
    member = person("mario", tenant).user
    assert member is not None
    principal = contract.playground_principal(member, tenant.id)
    assert (principal.tenant_limits.concurrency, principal.priority, principal.weight) == (2, "low", 7)
    assert (principal.currency, principal.billing_zone) == ("EUR", "Europe/Stockholm")
    assert not principal.may_override
    member.is_staff = True
    member.save()
    assert contract.playground_principal(member, tenant.id).may_override


@pytest.mark.parametrize("terms", [{"currency": "eur"}, {"currency": "EURO"}, {"billing_zone": "Europe/Nowhere"}])
def test_a_tenant_needs_a_currency_and_a_zone_that_exist(terms: dict[str, str]) -> None:
    with pytest.raises(Refused):
        create_tenant(Actor(), "borealis", **terms)


def test_limits_by_command(tenant: Tenant) -> None:
    made = told(
        "key",
        "create",
        "--tenant",
        "aurora",
        "--rpm",
        "5",
        "--budget",
        "day=1.5",
        "--budget",
        "total=9",
        "--may-override",
    )
    shown = told("limits", "show", "--key", made["id"])
    assert (shown["requests_per_minute"], shown["budget_day"], shown["budget_total"]) == (5, "1.5", "9")
    assert (shown["may_override"], shown["currency"]) == (True, "EUR")
    changed = told(
        "limits", "set", "--key", made["id"], "--rpm", "none", "--budget", "day=none", "--may-override", "no"
    )
    assert (changed["requests_per_minute"], changed["budget_day"], changed["may_override"]) == (None, None, False)
    assert told("limits", "set", "--tenant", "aurora", "--weight", "50", "--capture-content", "yes")["weight"] == 50
    assert told("limits", "show", "--tenant", "aurora")["capture_content"] is True
    for wrong in (["--budget", "week=1"], ["--budget", "day"], ["--rpm", "-1"], ["--may-override", "yes"]):
        with pytest.raises(CommandError):
            told("limits", "set", "--tenant", "aurora", *wrong)
