"""Budgets in Valkey against the ledger: what is corrected, and what is left alone."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from django.conf import settings
from hypothesis import given
from hypothesis import strategies as st

from console import coordination
from console.audit.actions import COMMAND_LINE
from console.billing import reconcile, tasks
from console.billing.models import UsageRecord
from console.billing.queries import spent
from console.billing.reconcile import APART_S, Look, is_lasting
from console.fleet import live
from console.keys.actions import create_key
from console.keys.models import APIKey
from console.keys.queries import budget_windows
from console.tenants.actions import create_tenant, set_limits
from console.tenants.limits import nano

pytestmark = pytest.mark.django_db
AMOUNTS = st.integers(0, 9_000_000 * 10**9)


@pytest.fixture
def key() -> APIKey:
    tenant = create_tenant(COMMAND_LINE, "aurora", currency="EUR", billing_zone="Asia/Kolkata")
    tenant = set_limits(COMMAND_LINE, tenant, {"budget_day": 5, "budget_total": 100})
    return create_key(COMMAND_LINE, tenant, "bot", limits={"budget_hour": 1}).key


def bill(key: APIKey, cost: str, currency: str = "EUR", at: float | None = None) -> None:
    UsageRecord.objects.create(
        id=uuid4(), started_at=datetime.fromtimestamp(at or time.time(), UTC), tenant_id=key.tenant_id, key_id=key.id,
        model="m", outcome="ok", prompt_tokens=1, cached_tokens=0, completion_tokens=1, reasoning_tokens=0,
        currency=currency, cost=cost,
    )  # fmt: skip


def counted(key: APIKey) -> list[int]:
    """What Valkey has as spent: hour of the key, day and total of its tenant."""
    names = [w.name for row in (key, key.tenant) for w in budget_windows(row).values()]
    return [budget.spent for budget in coordination.read([], names).budgets]


def earlier(looks: dict[str, Look]) -> dict[str, Look]:
    return {name: Look(look.at - 60, look.spent, look.ledger) for name, look in looks.items()}


@given(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, st.floats(0, 200))
def test_only_a_difference_that_lasts_is_lasting(s1: int, l1: int, s2: int, l2: int, apart: float) -> None:
    if is_lasting(Look(1000.0, s1, l1), Look(1000.0 + apart, s2, l2)):
        assert apart >= APART_S
        assert s1 - l1 == s2 - l2 != 0
        assert s2 < l2 or s1 == s2


@given(AMOUNTS, st.integers(1, 10**9))
def test_requests_of_one_price_on_their_way_to_the_ledger_are_no_difference(paid: int, price: int) -> None:
    """One is always under way, so the difference is the same at each look."""
    assert not is_lasting(Look(0, paid + price, paid), Look(60, paid + 9 * price, paid + 8 * price))
    assert is_lasting(Look(0, paid + price, paid), Look(60, paid + price, paid))
    assert is_lasting(Look(0, paid, paid + price), Look(60, paid + 8 * price, paid + 9 * price))
    assert not is_lasting(None, Look(60, paid + price, paid))


def test_what_valkey_never_heard_of_is_added_after_a_minute(key: APIKey) -> None:
    bill(key, "0.000000003")
    bill(key, "0.25")
    bill(key, "7", currency="USD")
    looks, corrected = reconcile.run({}, time.time())
    assert len(looks) == 3
    assert corrected == []
    again, corrected = reconcile.run(looks, time.time())  # too soon
    assert (again, corrected) == (looks, [])
    left, corrected = reconcile.run(earlier(looks), time.time())
    assert left == {}
    assert len(corrected) == 3
    assert counted(key) == [250_000_003] * 3
    assert reconcile.run({}, time.time()) == ({}, [])


def test_what_valkey_has_too_much_of_is_taken_away(key: APIKey) -> None:
    (window,) = budget_windows(key).values()
    assert coordination.correct(window.name, 0, 999)
    looks, _corrected = reconcile.run({}, time.time())
    assert [look.drift for look in looks.values()] == [999]
    reconcile.run(earlier(looks), time.time())
    assert counted(key)[0] == 0


def test_what_changes_between_look_and_correction_is_left_alone(key: APIKey, monkeypatch: pytest.MonkeyPatch) -> None:
    bill(key, "0.5")
    looks, _corrected = reconcile.run({}, time.time())
    correct = coordination.correct

    def late(name: str, seen: int, right: int) -> bool:
        assert correct(name, seen, seen + 7)  # a request settles just then
        return correct(name, seen, right)

    monkeypatch.setattr(coordination, "correct", late)
    _looks, corrected = reconcile.run(earlier(looks), time.time())
    assert corrected == []
    assert counted(key) == [7, 7, 7]


def test_the_ledger_counts_a_window_from_its_beginning_to_its_end(key: APIKey) -> None:
    window = budget_windows(key)["budget_hour"]
    for at, cost in ((window.start - 1, "1"), (window.start, "0.1"), (window.end - 0.001, "0.02"), (window.end, "3")):
        bill(key, cost, at=at)
    assert nano(spent("key", key.id, "EUR", window.start, window.end)) == 120_000_000
    assert window.start % 3600 == 1800  # an hour of Kolkata
    assert nano(spent("tenant", key.tenant_id, "EUR", 0, 0)) == 4_120_000_000


def test_the_job_keeps_its_looks_between_runs(key: APIKey) -> None:
    with live.client() as valkey:
        valkey.delete(tasks._KEY)
    bill(key, "0.5")
    assert tasks.reconcile_limits() == []
    assert counted(key) == [0, 0, 0]
    with live.client() as valkey:
        assert valkey.get(tasks._KEY)
        assert 0 < valkey.ttl(tasks._KEY) <= tasks._KEPT_S


def test_without_valkey_the_job_leaves_it_for_the_next_run(key: APIKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "VALKEY_URL", "unix:///nowhere/valkey.sock")
    assert tasks.reconcile_limits() == []
    with pytest.raises(coordination.Away):
        coordination.read([("key", str(key.id))])
