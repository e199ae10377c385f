"""Prompts and answers that a tenant keeps: written once, read by its people alone, gone in time."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from console.audit.models import AuditEntry
from console.telemetry import content
from console.telemetry.models import RequestContent as ContentRow
from console.telemetry.sink import DatabaseSink
from console.telemetry.tasks import expire_contents
from console.tenants.models import Tenant
from serving.port import RequestContent, Said, Settled
from tests.console.test_pages import signed_in
from tests.e2e.world import World, deliver, settled
from tests.e2e.world import world as world

QUESTION, ANSWER = "Which lamp burns <longest>?", "The blue one."


def with_words(made: Settled, question: str = QUESTION) -> Settled:
    record = made.record
    assert record.tenant_id is not None
    words = RequestContent(
        id=record.id,
        started_at=record.started_at,
        tenant_id=record.tenant_id,
        prompt=(Said("user", question, cut=True),),
        answer=(Said("assistant", ANSWER),),
        left_out=2,
    )
    return msgspec.structs.replace(made, content=words)


def kept(world: World) -> str:
    (request_id,) = deliver(with_words(settled(world.aurora, world.key)))
    return request_id


def test_words_are_written_once_and_hold_every_character(world: World) -> None:
    made = with_words(settled(world.aurora, world.key), "a\0b \\u0000 漢")
    for _ in range(2):
        DatabaseSink().write([made, settled(world.aurora, world.key)])
    row = ContentRow.objects.get()
    assert (str(row.id), row.tenant_id, row.started_at.timestamp()) == (
        made.record.id, world.aurora.id, made.record.started_at,
    )  # fmt: skip
    assert row.body == {
        "prompt": [{"role": "user", "text": "a\ufffdb \\u0000 漢", "cut": True}],
        "answer": [{"role": "assistant", "text": ANSWER, "cut": False}],
        "left_out": 2,
    }


@pytest.mark.parametrize("who", ["owner", "member"])
def test_the_tenants_people_open_them_and_that_is_noted(world: World, who: str) -> None:
    request_id = kept(world)
    client = signed_in(getattr(world, who))
    page = client.get(f"/requests/{request_id}/").content.decode()
    assert f"/requests/{request_id}/content/" in page and ANSWER not in page
    assert not AuditEntry.objects.filter(action="content.open").exists()
    text = client.post(f"/requests/{request_id}/content/").content.decode()
    for seen in ("Which lamp burns &lt;longest&gt;?", ANSWER, "2 older messages not kept", "It goes on"):
        assert seen in text
    entry = AuditEntry.objects.get(action="content.open")
    assert (entry.actor_label, entry.target_id, entry.tenant_id) == (
        getattr(world, who).username, request_id, world.aurora.id,
    )  # fmt: skip
    assert ANSWER not in json.dumps(entry.details)


@pytest.mark.parametrize("who", ["viewer", "admin"])
def test_others_who_see_the_request_see_only_that_there_is_something(world: World, who: str) -> None:
    request_id = kept(world)
    client = signed_in(getattr(world, who))
    page = client.get(f"/requests/{request_id}/").content.decode()
    assert "kept, redacted; " in page and f"/requests/{request_id}/content/" not in page
    text = client.post(f"/requests/{request_id}/content/", follow=True).content.decode()
    assert "Only owners and members" in text and ANSWER not in page + text
    assert not AuditEntry.objects.filter(action="content.open").exists()


@pytest.mark.parametrize("who", ["stranger", "nobody"])
def test_a_stranger_learns_nothing(world: World, who: str) -> None:
    answer = signed_in(getattr(world, who)).post(f"/requests/{kept(world)}/content/")
    assert answer.status_code == 404 and ANSWER not in answer.content.decode()


def test_a_request_without_words_says_so(world: World) -> None:
    (request_id,) = deliver(settled(world.aurora, world.key))
    client = signed_in(world.owner)
    assert "Prompt and answer are not stored." in client.get(f"/requests/{request_id}/").content.decode()
    text = client.post(f"/requests/{request_id}/content/", follow=True).content.decode()
    assert "not kept, or no longer" in text


def test_owners_alone_turn_it_on_and_off(world: World) -> None:
    values = {"capture_content": "yes", "capture_days": "3"}
    for who, seen in ((world.admin, 200), (world.member, 200), (world.viewer, 200), (world.stranger, 404)):
        answer = signed_in(who).post("/tenants/aurora/capture/", values, follow=True)
        assert answer.status_code == seen
        world.aurora.refresh_from_db()
        assert not world.aurora.capture_content
    client = signed_in(world.owner)
    text = client.post("/tenants/aurora/capture/", values, follow=True).content.decode()
    assert "kept for 3 days" in text
    assert AuditEntry.objects.get(action="tenant.limits").details == {
        "capture_content": [False, True], "capture_days": [7, 3],
    }  # fmt: skip
    too_long = client.post("/tenants/aurora/capture/", {"capture_days": "31"}, follow=True).content.decode()
    assert "capture_days must be a whole number from 1 to 30" in too_long
    client.post("/tenants/aurora/capture/", {"capture_content": "no"})
    world.aurora.refresh_from_db()
    assert not world.aurora.capture_content


def aged(tenant: Tenant | None, days: float) -> UUID:
    at = timezone.now() - timedelta(days=days)
    return ContentRow.objects.create(id=uuid4(), started_at=at, tenant_id=tenant.id if tenant else uuid4(), body={}).id


def test_words_go_when_their_tenants_days_are_over(world: World) -> None:
    Tenant.objects.filter(id=world.aurora.id).update(capture_days=3)
    Tenant.objects.filter(id=world.borealis.id).update(capture_days=365)
    young = {aged(world.aurora, 2.9), aged(world.borealis, 29.9), aged(None, 29.9)}
    old = [aged(world.aurora, 3.1), aged(world.borealis, 30.1), aged(None, 30.1)]
    assert expire_contents() == len(old)
    assert set(ContentRow.objects.values_list("id", flat=True)) == young
    assert expire_contents() == 0


def erased(*arguments: str) -> Any:
    out = StringIO()
    call_command("content", "erase", *arguments, "--json", stdout=out)
    return json.loads(out.getvalue())["erased"]


def test_words_are_erased_by_command_and_the_record_stays(world: World) -> None:
    first, second = kept(world), kept(world)
    theirs = aged(world.borealis, 1)
    assert erased("--request", first) == 1
    assert erased("--request", first) == 0
    assert erased("--tenant", "aurora") == 1
    assert list(ContentRow.objects.values_list("id", flat=True)) == [theirs]
    entries = AuditEntry.objects.filter(action="content.erase").order_by("id")
    assert [entry.details for entry in entries] == [{"requests": 1, "request": first}, {"requests": 1}]
    assert signed_in(world.owner).get(f"/requests/{second}/").status_code == 200
    with pytest.raises(CommandError, match="no tenant named"):
        erased("--tenant", "nobody")


def test_what_cannot_be_chosen_is_not_erased(world: World) -> None:
    kept(world)
    with pytest.raises(content.Refused):
        content.erase(content.Actor(user=world.owner))
    assert ContentRow.objects.count() == 1
