"""External endpoints: their keys sealed and told to nobody, their addresses checked before a request goes there."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from io import StringIO

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection

from console.audit.actions import COMMAND_LINE
from console.audit.models import AuditEntry
from console.base.egress import parse_allow
from console.base.sealing import SealBroken, seal, unseal
from console.errors import NotAllowed, Refused
from console.fleet import external, snapshot
from console.fleet.actions import ensure_replicas, move_replica
from console.fleet.endpoint_actions import add_endpoint, endpoint_facts, remove_endpoint, set_endpoint
from console.fleet.external import Checked, Checks, Step, decide, facts_of
from console.fleet.models import Deployment, Endpoint, Replica, Transition
from console.fleet.route_actions import create_route, set_target
from console.tenants.actions import create_tenant
from console.tenants.models import Membership
from tests.console.test_key_actions import person

pytestmark = pytest.mark.django_db
KEY = "sk-very-secret-1234567890"
VALUES = {"base_url": "https://API.example.com/v1/", "served_name": "big-model", "api_key": KEY, "max_num_seqs": 8}
GOOD = Checked(("93.184.216.34",))
State = Replica.State


@pytest.fixture
def deployment() -> Deployment:
    return add_endpoint(COMMAND_LINE, "hosted", VALUES)


@pytest.fixture
def replica(deployment: Deployment) -> Replica:
    return ensure_replicas(deployment)[0]


def step(replica: Replica, found: Checked | None = None, unchecked_s: float = 0.0, failures: int = 0) -> Step:
    """Decide, and write what was decided, as the controller does."""
    endpoint = Endpoint.objects.get(deployment=replica.deployment)
    made = decide(replica, endpoint, unchecked_s, failures, True, found)
    if made.state != replica.state or made.changes:
        move_replica(replica, made.state, made.reason, **made.changes)
    return made


def test_a_sealed_text_is_read_by_this_installation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = seal(KEY)
    assert KEY not in sealed
    assert unseal(sealed) == KEY
    assert seal(KEY) != sealed
    with pytest.raises(SealBroken):
        unseal(sealed[:-4] + "AAA=")
    monkeypatch.setattr(settings, "SECRET_KEY", "another secret")
    with pytest.raises(SealBroken) as caught:
        unseal(sealed)
    assert sealed not in str(caught.value)


def test_the_key_stands_nowhere_in_the_clear(deployment: Deployment) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT row_to_json(e)::text FROM fleet_endpoint e")
        assert KEY not in cursor.fetchone()[0]
        cursor.execute("SELECT coalesce(string_agg(row_to_json(a)::text, ''), '') FROM audit_auditentry a")
        assert KEY not in cursor.fetchone()[0]
    assert KEY not in str(endpoint_facts(deployment.endpoint))
    assert endpoint_facts(deployment.endpoint)["api_key_end"] == "7890"
    assert deployment.endpoint.base_url == "https://api.example.com"


@pytest.mark.parametrize("key", ["sk secret", "sk-secret\n", "sécret", 5, "k" * 5000])
def test_a_key_that_cannot_be_sent_is_refused_without_being_repeated(key: object) -> None:
    with pytest.raises(Refused) as caught:
        add_endpoint(COMMAND_LINE, "hosted", {**VALUES, "api_key": key})
    assert caught.value.field == "api_key"
    assert str(key) not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"base_url": "ftp://x"}, "base_url"), ({"base_url": "https://a:b@x.example.com"}, "base_url"),
    ({"served_name": ""}, "served_name"),
     ({"max_num_seqs": -1}, "max_num_seqs"), ({"proxy": "x"}, "proxy")],
)  # fmt: skip
def test_an_endpoint_that_cannot_be_used_names_its_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(Refused) as caught:
        add_endpoint(COMMAND_LINE, "hosted", {**VALUES, **change})
    assert caught.value.field == field


def test_only_admins_change_endpoints(deployment: Deployment) -> None:
    owner = person("olga", create_tenant(COMMAND_LINE, "aurora"), Membership.Role.OWNER)
    for act in (
        lambda: add_endpoint(owner, "mine", VALUES),
        lambda: set_endpoint(owner, deployment, {"max_num_seqs": 1}),
        lambda: remove_endpoint(owner, deployment),
    ):
        with pytest.raises(NotAllowed):
            act()


def test_it_is_ready_once_its_address_is_checked_and_every_change_has_its_reason(replica: Replica) -> None:
    assert step(replica).check
    assert replica.state == State.VERIFYING
    step(replica, GOOD)
    assert (replica.state, replica.epoch) == (State.READY, 1)
    assert replica.facts == facts_of(replica.deployment.endpoint, GOOD.addresses)
    assert not step(replica).check
    assert step(replica, unchecked_s=external.RECHECK_S).check
    step(replica, Checked(("1.1.1.1",)))
    assert (replica.state, replica.epoch, replica.facts["addresses"]) == (State.READY, 2, ["1.1.1.1"])
    reasons = list(Transition.objects.order_by("id").values_list("new", "reason"))
    assert [new for new, _reason in reasons] == ["verifying", "ready", "ready"]
    assert all(reason for _new, reason in reasons)


def test_a_name_that_cannot_be_resolved_for_a_while_takes_nothing_out_of_rotation(replica: Replica) -> None:
    step(replica)
    step(replica, GOOD)
    assert step(replica, Checked(reason="no answer")).state == State.READY
    assert replica.facts["addresses"] == list(GOOD.addresses)
    step(replica, Checked(reason="it is a private address", refused=True))
    assert (replica.state, replica.reason) == (State.FAILED, "it is a private address")


def test_one_that_failed_is_checked_again_after_a_while_and_says_what_is_new(replica: Replica) -> None:
    step(replica)
    step(replica, Checked(reason="no answer"))
    assert replica.state == State.FAILED
    assert not step(replica, unchecked_s=1.0, failures=3).check
    assert step(replica, unchecked_s=100.0, failures=3).check
    count = Transition.objects.count()
    step(replica, Checked(reason="no answer"))
    assert Transition.objects.count() == count
    step(replica, Checked(reason="it is a loopback address", refused=True))
    assert replica.reason == "it is a loopback address"
    step(replica, GOOD)
    assert replica.state == State.READY


def test_a_changed_address_is_out_of_rotation_until_it_is_checked(replica: Replica) -> None:
    step(replica)
    step(replica, GOOD)
    set_endpoint(COMMAND_LINE, replica.deployment, {"max_num_seqs": 2})
    step(replica)
    assert (replica.state, replica.facts["max_num_seqs"]) == (State.READY, 2)
    set_endpoint(COMMAND_LINE, replica.deployment, {"base_url": "https://other.example.com"})
    assert step(replica).check
    assert replica.state == State.VERIFYING


def test_an_unwanted_one_stops(replica: Replica) -> None:
    endpoint = replica.deployment.endpoint
    assert decide(replica, endpoint, 0, 0, False, None).state == State.STOPPED
    replica.state = State.STOPPED
    assert decide(replica, endpoint, 0, 0, False, None) == Step(State.STOPPED)
    assert decide(replica, endpoint, 0, 0, True, None).check


def snapshot_row(deployment: Deployment, **change: object) -> dict[str, object]:
    endpoint = deployment.endpoint
    return {
        "id": "r", "state": "ready", "epoch": 1, "uds": "", "device": "external", "engine_version": "", "ordinal": 1,
        "facts": facts_of(endpoint, GOOD.addresses), "deployment_id": "d", "deployment_name": "hosted",
        "engine": "external", "base_url": endpoint.base_url, "api_key_sealed": endpoint.api_key_sealed, **change,
    }  # fmt: skip


def test_gateways_get_the_key_and_the_pinned_addresses(deployment: Deployment) -> None:
    replica = snapshot._replica(snapshot_row(deployment))
    assert replica is not None
    assert (replica.url, replica.addresses, replica.api_key) == ("https://api.example.com", GOOD.addresses, KEY)
    assert (replica.served_name, replica.max_num_seqs, replica.extras) == ("big-model", 8, frozenset())


def test_a_key_goes_to_no_host_but_the_one_that_was_checked(deployment: Deployment) -> None:
    assert snapshot._replica(snapshot_row(deployment, base_url="https://other.example.com")) is None


def test_a_key_that_cannot_be_read_takes_nothing_else_along(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert snapshot._replica(snapshot_row(deployment, api_key_sealed="broken")) is None
    assert "hosted" in caplog.text
    assert "broken" not in caplog.text


def test_a_check_runs_aside_and_one_of_an_older_address_counts_as_none(replica: Replica) -> None:
    asked, answer = threading.Event(), threading.Event()

    def resolve(_host: str, _port: int) -> Sequence[str]:
        asked.set()
        assert answer.wait(10)
        return ["127.0.0.1"]

    checks = Checks(parse_allow("127.0.0.0/8"), resolve)
    checks.begin(replica.id, "http://one.example.com")
    assert asked.wait(10)
    assert checks.ended(replica.id, "http://one.example.com") is None
    checks.begin(replica.id, "http://two.example.com")  # one at a time
    answer.set()
    checks._running[replica.id].join(10)
    assert checks.ended(replica.id, "http://two.example.com") is None
    checks.begin(replica.id, "http://two.example.com")
    checks._running[replica.id].join(10)
    assert checks.ended(replica.id, "http://two.example.com") == Checked(("127.0.0.1",))
    assert checks.age_s(replica.id) < 10


def test_an_endpoint_in_use_is_not_removed(deployment: Deployment) -> None:
    route = create_route(COMMAND_LINE, "chat")
    set_target(COMMAND_LINE, route, deployment, {})
    with pytest.raises(Refused, match="chat"):
        remove_endpoint(COMMAND_LINE, deployment)
    route.delete()
    ensure_replicas(deployment)
    remove_endpoint(COMMAND_LINE, deployment)
    assert not Deployment.objects.exists()
    assert not Endpoint.objects.exists()
    assert Transition.objects.get().reason == "Its endpoint was removed"


def test_endpoints_by_command(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr("sys.stdin", StringIO(KEY + "\n"))
    call_command(
        "endpoint", "add", "hosted", "--url", "http://127.0.0.1:9000", "--model", "x", "--route", "chat", "--with-key",
        "--json", stdout=out,
    )  # fmt: skip
    call_command("endpoint", "list", "--json", stdout=out)
    added, listed = map(json.loads, out.getvalue().splitlines())
    assert added == listed
    assert KEY not in out.getvalue()
    assert unseal(Endpoint.objects.get().api_key_sealed) == KEY
    call_command("endpoint", "set", "hosted", "--slots", "4", stdout=out)
    assert Endpoint.objects.get().max_num_seqs == 4
    with pytest.raises(CommandError, match="in use by chat"):
        call_command("endpoint", "remove", "hosted")
    call_command("route", "target", "chat", "hosted", "--remove", stdout=out)
    call_command("endpoint", "remove", "hosted", stdout=out)
    assert "is removed" in out.getvalue()
    assert [e.action for e in AuditEntry.objects.order_by("id")] == [
        "endpoint.add", "route.create", "route.target", "endpoint.set", "route.target", "endpoint.remove",
    ]  # fmt: skip
