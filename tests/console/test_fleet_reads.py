"""What others ask of the fleet: logs that are searched, and how long a start takes."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.conf import settings
from django.utils import timezone

from console.audit.actions import COMMAND_LINE
from console.catalog.models import Model
from console.fleet import starts
from console.fleet.actions import deploy
from console.fleet.models import Deployment, Replica
from console.fleet.worker_logs import LONGEST_LINE, search_log

State = Replica.State


@pytest.fixture
def written() -> uuid.UUID:
    """A replica whose log has gone round once."""
    replica_id = uuid.uuid4()
    folder = settings.LAYOUT.workers / str(replica_id)
    folder.mkdir(parents=True)
    (folder / "worker.log.1").write_text("old Error one\nfine\n")
    (folder / "worker.log").write_bytes(b"loading\nERROR two\x1b[31m red\n" + b"x" * 9000 + b"\nerror \xff three\n")
    return replica_id


def test_a_log_is_searched_from_its_oldest_line_and_the_newest_are_kept(written: uuid.UUID) -> None:
    found = search_log(written, "error")
    assert [(line.number, line.text) for line in found.lines] == [
        (1, "old Error one"), (4, "ERROR two·[31m red"), (6, "error \ufffd three"),
    ]  # fmt: skip
    assert (found.total, found.searched) == (3, 6)
    assert [line.number for line in search_log(written, "error", limit=1).lines] == [6]
    assert search_log(written, "error", limit=1).total == 3


def test_without_a_word_it_is_the_end_and_lines_are_bounded(written: uuid.UUID) -> None:
    found = search_log(written, limit=2)
    assert [len(line.text) for line in found.lines] == [LONGEST_LINE, len("error \ufffd three")]
    assert search_log(uuid.uuid4()).lines == ()


@pytest.mark.django_db
def test_the_expected_time_of_a_start_is_its_own_then_its_engines_then_the_usual() -> None:
    model = Model.objects.create(name="Fake", source="file:fake", path="/fake", sha256="0" * 64)
    one = deploy(COMMAND_LINE, model, "one", "one")
    two = deploy(COMMAND_LINE, model, "two", "two")
    assert starts.start_eta_s(one) == 10.0, "as the adapter says"
    now = timezone.now()
    replica = Replica.objects.create(
        deployment=two, ordinal=1, state=State.READY, started_at=now - timedelta(seconds=40), ready_at=now
    )
    starts.learn(replica)
    two.refresh_from_db()
    assert two.start_s == pytest.approx(40)
    assert starts.start_eta_s(one) == pytest.approx(40)
    replica.ready_at = now - timedelta(seconds=20)
    starts.learn(replica)
    assert Deployment.objects.get(name="two").start_s == pytest.approx(30)
    replica.ready_at = now - timedelta(seconds=11)
    starts.learn(replica)
    assert Deployment.objects.get(name="two").start_s == pytest.approx(30), "less than a twentieth is not written"


@pytest.mark.django_db
def test_what_is_left_of_a_start_that_is_under_way() -> None:
    model = Model.objects.create(name="Fake", source="file:fake", path="/fake", sha256="0" * 64)
    one = deploy(COMMAND_LINE, model, "one", "one")
    one.start_s = 60.0
    assert starts.ready_in_s(one) == 60.0
    Replica.objects.create(
        deployment=one, ordinal=1, state=State.LOADING, started_at=timezone.now() - timedelta(seconds=45)
    )
    assert starts.ready_in_s(one) == pytest.approx(15, abs=5)
    Replica.objects.update(started_at=timezone.now() - timedelta(seconds=90))
    assert starts.ready_in_s(one) == 1.0
