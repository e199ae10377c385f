"""The small pure parts: billing table, routing, traces, keys, disk and age of the configuration."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from serving import apikey, metering, routing
from serving.errors import GatewayError, Unavailable
from serving.metering import Counts, Details, Usage, billed
from serving.port import Outcome
from serving.snapshot import Configuration
from serving.telemetry import tracing
from tests.serving.fakes import FakeSnapshots, replica, snapshot

ROOT = Path(__file__).parents[2]
DOCS, SERVING = ROOT / "docs", ROOT / "serving"


@pytest.mark.parametrize(
    ("outcome", "delivered", "bills"),
    [
        (Outcome.OK, True, True),
        (Outcome.OK, False, True),
        (Outcome.CANCELLED, True, True),
        (Outcome.CANCELLED, False, True),
        (Outcome.TIMEOUT, True, True),
        (Outcome.TIMEOUT, False, True),
        (Outcome.SLOW_READER, True, True),
        (Outcome.ERROR, True, True),
        (Outcome.ERROR, False, False),
        (Outcome.REJECTED, False, False),
    ],
)
def test_what_each_outcome_bills(outcome: Outcome, delivered: bool, bills: bool) -> None:
    counts = Counts(prompt=10, cached=4, completion=3, relayed=2)
    bill = billed(outcome, counts, delivered=delivered)
    assert bill == (metering.Billed(10, 4, 3, 0) if bills else metering.NOTHING)


def test_every_outcome_stands_in_the_docs() -> None:
    text = (DOCS / "metering.md").read_text()
    assert all(f"`{outcome}`" in text for outcome in Outcome)


def test_every_metric_and_error_code_stands_in_the_docs() -> None:
    from serving.telemetry import names

    text = (DOCS / "gateway.md").read_text()
    assert [name for name in names.METRICS if f"`{name}" not in text] == []
    sources = "\n".join(path.read_text() for path in SERVING.rglob("*.py"))
    raised = {cls.code for cls in tree(GatewayError)} | set(re.findall(r'code(?:: str)? ?= ?"([a-z_]+)"', sources))
    rows = re.findall(r"^\| [45]\d\d[^|]*\|([^|]*)\|", text, re.MULTILINE)
    told = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    assert told == raised - {"gateway_lost"}  # which the shipper writes for a dead gateway; nobody is told


def tree(cls: type[GatewayError]) -> list[type[GatewayError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in tree(sub))]


def test_counts_only_grow() -> None:
    counts = Counts()
    counts.take(Usage(10, 5, Details(cached_tokens=4), Details(reasoning_tokens=2)), 5)
    counts.take(Usage(0, 0), 0)
    counts.relayed = 3
    assert (counts.prompt, counts.cached, counts.generated, counts.reasoning) == (10, 4, 5, 2)
    counts.relayed = 9
    assert counts.generated == 9


def candidates(*in_flight: int, **changes: object) -> list[routing.Candidate]:
    path = Path("/x")
    return [routing.Candidate(replica(path, n, **changes), count) for n, count in enumerate(in_flight)]


def test_least_connections_takes_the_emptiest_and_rotates_ties() -> None:
    assert routing.choose("least-connections", candidates(3, 1, 2), turn=0).replica.id == "replica-1"  # type: ignore[union-attr]
    chosen = {routing.choose("least-connections", candidates(0, 0, 0), turn=t).replica.id for t in range(3)}  # type: ignore[union-attr]
    assert len(chosen) == 3


def test_round_robin_takes_turns_whatever_the_load() -> None:
    chosen = [routing.choose("round-robin", candidates(9, 0), turn=t).replica.id for t in range(4)]  # type: ignore[union-attr]
    assert chosen == ["replica-0", "replica-1"] * 2


def test_a_replica_that_just_failed_is_avoided_unless_it_is_the_last() -> None:
    decision = routing.choose("least-connections", candidates(0, 5), turn=0, avoid=["replica-0"])
    assert decision.replica is not None and decision.replica.id == "replica-1"
    assert [row["verdict"] for row in decision.candidates] == ["chosen", "just failed"]
    decision = routing.choose("least-connections", candidates(0), turn=0, avoid=["replica-0"])
    assert decision.replica is not None


def test_no_replica_has_a_reason() -> None:
    assert routing.choose("round-robin", [], turn=0).reason == "the route has no replica"
    decision = routing.choose("round-robin", candidates(0, state="starting"), turn=0)
    assert (decision.replica, decision.reason) == (None, "no replica is ready")


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "continues"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-more", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        ("nonsense", False),
        ("", False),
        (None, False),
    ],
)
def test_a_valid_trace_is_continued_and_any_other_replaced(header: str | None, continues: bool) -> None:
    context = tracing.continued(header)
    assert (context.trace_id == TRACE) is continues
    assert context.span_id != SPAN
    assert tracing.continued(context.header()).trace_id == context.trace_id


def test_keys() -> None:
    key = apikey.generate()
    assert apikey.is_well_formed(key)
    assert not apikey.is_well_formed(key[:-1] + ("0" if key[-1] != "0" else "1"))
    assert apikey.digest(key, b"a") != apikey.digest(key, b"b")
    assert apikey.cache_salt("t1", b"a") != apikey.cache_salt("t2", b"a")
    assert key[3:-4] not in apikey.display(key)


def test_a_step_of_the_wall_clock_does_not_age_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Configuration(FakeSnapshots(snapshot([])), max_age_s=900)
    configuration.current()
    now = time.time()
    for step in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda step=step: now + step)
        configuration.current()
    monkeypatch.undo()
    later = time.monotonic() + 901
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(Unavailable):
        configuration.current()
