"""The sweep of max_num_seqs: its judgement, and one over a real worker process."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from hypothesis import given
from hypothesis import strategies as st

from console.audit.actions import COMMAND_LINE
from console.audit.models import AuditEntry
from console.fleet import probe, sweep, sweeping
from console.fleet.deployment_form import parameter_rows
from console.fleet.models import Deployment, Replica, Route, RouteTarget
from console.fleet.sweep import Step
from console.fleet.sweeping import Asked
from tests.console.fleet_house import House


def step(sequences: int, tokens_s: float, p99_s: float = 1.0, preemptions: int = 0, failed: int = 0) -> Step:
    return Step(sequences, 12, failed, p99_s / 2, p99_s, tokens_s, 256, 0.4, preemptions, waited=False, error="no")


@given(st.integers(1, 5000))
def test_numbers_double_up_to_the_most(most: int) -> None:
    found = list(sweep.numbers(most))
    assert (found[0], found[-1]) == (1, most)
    assert all(before < after <= 2 * before for before, after in zip(found, found[1:], strict=False))


@given(
    st.lists(st.tuples(st.floats(1, 1000), st.floats(0.1, 10), st.integers(0, 1), st.integers(0, 1)), max_size=10),
    st.none() | st.floats(0.1, 10),
)
def test_what_something_objects_to_is_never_advised(
    rows: list[tuple[float, float, int, int]], limit: float | None
) -> None:
    steps = [step(1 << n, *row) for n, row in enumerate(rows)]
    verdict = sweep.judge(steps, limit)
    good = [each for each in steps if not sweep.objection(each, limit)]
    assert (verdict.best is None) == (not good)
    if verdict.best:
        assert verdict.best in good
        assert verdict.best.tokens_s >= max(each.tokens_s for each in good) * (1 - sweep.WORTH)
        smaller = [each for each in good if each.sequences < verdict.best.sequences]
        assert all(each.tokens_s < verdict.best.tokens_s / (1 - sweep.WORTH) for each in smaller)


def test_latency_or_memory_says_why_it_ends() -> None:
    steps = [step(1, 100, 0.5), step(2, 180, 0.9), step(4, 250, 1.8)]
    verdict = sweep.judge(steps, 1.5)
    assert verdict.best == steps[1]
    assert sweep.words(verdict.stopped_by) == "P99 was 1.80 s at 4, and may be 1.5 s."
    whole = sweep.judge(steps, None)
    assert (whole.best, sweep.words(whole.stopped_by)) == (steps[2], "4 is what it was started with.")
    crowded = sweep.judge([step(1, 9, preemptions=3)], None).stopped_by
    assert sweep.words(crowded) == "Memory: 3 sequences were preempted at 1, with 40% of KV in use."
    failed = sweep.judge([step(1, 9, failed=2)], None).stopped_by
    assert sweep.words(failed) == "2 of 12 requests failed at 1: no"


def test_a_larger_batch_that_brings_nothing_is_not_advised() -> None:
    steps = [step(1, 100), step(2, 180), step(4, 182)]
    assert sweep.judge(steps, None).best == steps[1]


@pytest.fixture
def swept(house: House) -> Deployment:
    replica = house.until_state(Replica.State.READY)
    replica.facts["max_num_seqs"] = 4
    replica.save(update_fields=["facts"])
    return house.deployment


def run(*more: str) -> list[dict[str, object]]:
    out = StringIO()
    call_command("deployment", "sweep", "fake", "--json", *more, stdout=out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.django_db(transaction=True)
class TestOverAWorker:
    def test_every_step_is_told_and_the_result_is_kept_as_advice(self, swept: Deployment) -> None:
        RouteTarget.objects.all().delete()
        *steps, verdict = run("--prompt-tokens", "8", "--answer-tokens", "2", "--p99", "30")
        assert [each["sequences"] for each in steps] == [1, 2, 4]
        assert all(each["failed"] == 0 and each["requests"] == 12 for each in steps)
        swept.refresh_from_db()
        assert swept.sweep["best"] == verdict["best"]
        assert [each["tokens_s"] for each in swept.sweep["steps"]] == [each["tokens_s"] for each in steps]
        assert AuditEntry.objects.get(action="deployment.swept").details["best"] == verdict["best"]
        swept.engine = "embedded"
        (row,) = [each for each in parameter_rows(swept, "cpu") if each.name == "max_num_seqs"]
        assert f": {verdict['best']} brought " in row.measured and "Measured on cpu on " in row.measured
        swept.quantisation = "int8"  # other weights
        assert not any(each.measured for each in parameter_rows(swept, "cpu"))

    def test_what_serves_a_route_is_not_swept_by_accident(self, swept: Deployment) -> None:
        route = Route.objects.first()
        assert route is not None and route.targets.filter(deployment=swept).exists()
        with pytest.raises(CommandError, match="would delay its requests.*--in-service"):
            run()
        assert run("--prompt-tokens", "8", "--answer-tokens", "2", "--in-service")[-1]["stopped_by"]

    def test_what_was_measured_stays_where_a_worker_stops_telling_its_state(
        self, swept: Deployment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def silent(where: probe.Where) -> probe.Answer:
            if told["steps"]:
                raise probe.NoAnswer("it is gone")
            return real(where)

        def say(_step: Step) -> None:
            told["steps"] += 1

        real, told = probe.ask, {"steps": 0}
        monkeypatch.setattr(probe, "ask", silent)
        verdict = sweeping.run(COMMAND_LINE, swept, Asked(8, 2, in_service=True), say)
        assert sweep.words(verdict.stopped_by).startswith("The worker did not tell its state any more at 2")
        swept.refresh_from_db()
        assert [each["sequences"] for each in swept.sweep["steps"]] == [1] and verdict.best is not None

    def test_without_a_ready_replica_it_says_so(self, swept: Deployment) -> None:
        RouteTarget.objects.all().delete()
        Replica.objects.update(state=Replica.State.STARTING)
        with pytest.raises(CommandError, match="no replica that is ready"):
            run()

    @pytest.mark.parametrize("words", [("--prompt-tokens", "0"), ("--rounds", "x"), ("--p99", "-1"), ("--p99", "nan")])
    def test_sizes_that_make_no_sense_are_refused(self, words: tuple[str, str]) -> None:
        with pytest.raises(CommandError, match="must be"):
            run(*words)
