"""The price book: versions that are only ever added, and the one that holds."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from console.audit.actions import COMMAND_LINE
from console.audit.models import AuditEntry
from console.errors import NotAllowed, Refused
from console.fleet.route_actions import create_route
from console.pricing.actions import set_price
from console.pricing.models import Price
from console.pricing.queries import history, in_force
from console.tenants.actions import create_tenant
from console.tenants.models import Membership
from tests.console.test_key_actions import person

pytestmark = pytest.mark.django_db
USD = {"model": "m", "currency": "USD", "input": "0.15", "output": "0.6"}


@pytest.fixture(autouse=True)
def _route() -> None:
    create_route(COMMAND_LINE, "m")


def test_a_change_is_the_next_version() -> None:
    first = set_price(COMMAND_LINE, USD)
    second = set_price(COMMAND_LINE, {**USD, "input": "0.2", "cached_input": "0.000001"})
    euro = set_price(COMMAND_LINE, {**USD, "currency": "EUR"})
    assert [first.version, second.version, euro.version] == [1, 2, 1]
    assert in_force("m", "USD") == second
    assert (first.cached_input, second.cached_input) == (Decimal("0.15"), Decimal("0.000001"))
    assert second.as_struct().input == 200_000
    assert second.as_struct().cached_input == 1
    assert [(v.price.currency, v.price.version, v.state) for v in history()] == [
        ("EUR", 1, "in force"), ("USD", 2, "in force"), ("USD", 1, "past"),
    ]  # fmt: skip
    entry = AuditEntry.objects.order_by("-id")[1]
    assert (entry.action, entry.details["input"], entry.details["cached_input"]) == ("price.set", "0.2", "0.000001")


def test_a_planned_price_holds_from_its_time_on_and_a_later_one_may_replace_it() -> None:
    now = set_price(COMMAND_LINE, USD)
    start = timezone.now() + timedelta(days=1)
    planned = set_price(COMMAND_LINE, {**USD, "input": "9", "effective_at": start.isoformat()})
    assert in_force("m", "USD") == now
    assert in_force("m", "USD", start) == planned
    instead = set_price(COMMAND_LINE, {**USD, "input": "8", "effective_at": start.isoformat()})
    assert in_force("m", "USD", start) == instead
    assert [v.state for v in history(["m"])] == ["planned", "planned", "in force"]
    between = set_price(COMMAND_LINE, {**USD, "input": "7"})
    assert in_force("m", "USD") == between
    assert in_force("m", "USD", start) == instead  # what was announced for a day comes on that day


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "unknown"}, "model"), ({"currency": "usd"}, "currency"), ({"input": "-1"}, "input"),
        ({"output": "0.0000001"}, "output"), ({"effective_at": "2020-01-01"}, "effective_at"),
        ({"version": 9}, "version"),
        ({"output": "1000001"}, "output"),
    ],
)  # fmt: skip
def test_a_price_that_cannot_be_used_names_its_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(Refused) as caught:
        set_price(COMMAND_LINE, {**USD, **change})
    assert caught.value.field == field
    with pytest.raises(Refused, match="output is missing"):
        set_price(COMMAND_LINE, {name: value for name, value in USD.items() if name != "output"})
    assert not Price.objects.exists()


@pytest.mark.parametrize("statement", ["UPDATE pricing_price SET input = 0", "DELETE FROM pricing_price"])
def test_the_price_book_refuses_update_and_delete(statement: str) -> None:
    set_price(COMMAND_LINE, USD)
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)


def test_only_admins_set_prices() -> None:
    owner = person("olga", create_tenant(COMMAND_LINE, "aurora"), Membership.Role.OWNER)
    with pytest.raises(NotAllowed):
        set_price(owner, USD)


def test_prices_by_command() -> None:
    out = StringIO()
    call_command("price", "set", "m", "--input", "0.15", "--output", "0.60", "--json", stdout=out)
    call_command("price", "list", "--model", "m", "--json", stdout=out)
    first, listed = map(json.loads, out.getvalue().splitlines())
    assert first == listed
    assert (first["input"], first["output"], first["version"], first["state"]) == ("0.15", "0.6", 1, "in force")
    with pytest.raises(CommandError, match="no route named x"):
        call_command("price", "set", "x", "--input", "1", "--output", "1")
