"""Workers that fail and a fleet that changes, under load, on a whole installation: the bars of bench/fleet.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from bench import fleet
from bench.fleet import Figures, Site
from bench.stack import Stack

pytestmark = pytest.mark.timeout(600)

# Each costs a minute or more and shows nothing here that the others do not: bench/fleet.py has them.
FAILURES = [each for each in fleet.FAILURES if each not in (fleet.oom, fleet.slow)]
CHANGES = [each for each in fleet.CHANGES if each is not fleet.surge]


@pytest.fixture(scope="module")
def site(stack: Stack) -> Iterator[Site]:
    """Two replicas with the engine's test hooks; what the session's stack has compiled is not compiled again."""
    with fleet.site_of(2, stack.data / "native") as made:
        yield made


@pytest.mark.parametrize("scenario", FAILURES, ids=lambda each: each.__name__)
def test_no_request_without_a_byte_fails_with_a_worker(site: Site, scenario: Callable[[Site], Figures]) -> None:
    """R19 and R24: killed, stopped, deadlocked, robbed of its socket."""
    figures = scenario(site)
    assert figures.ok, figures.line()


def test_the_stack_and_the_reason_of_a_deadlock_are_kept(site: Site) -> None:
    """Runs after the scenario above: what the step thread waited for, read before the kill."""
    code = (
        "import json; from console.fleet.models import StackCapture;"
        "print(json.dumps(list(StackCapture.objects.values('reason', 'text'))))"
    )
    captures = json.loads(site.stack.manage("shell", "-v", "0", "-c", code))
    deadlock = next(each for each in captures if "no step" in each["reason"])
    assert "engine-steps" in deadlock["text"]
    assert "_maybe_hang (engine/faults.py" in deadlock["text"]


@pytest.mark.parametrize("scenario", CHANGES, ids=lambda each: each.__name__)
def test_a_fleet_that_changes_fails_nobody(site: Site, scenario: Callable[[Site], Figures]) -> None:
    """To one and back; a rollout whose controller is killed: no orphan, no second worker."""
    figures = scenario(site)
    assert figures.ok, figures.line()


@pytest.mark.parametrize(("scenario", "count", "card"), fleet.FULL, ids=lambda each: getattr(each, "__name__", None))
def test_a_rollout_on_a_full_card_dips_no_longer_than_a_cold_start(
    stack: Stack, scenario: Callable[[Site], Figures], count: int, card: str
) -> None:
    """Every request is a 200, or a 503 after the queue's full time."""
    with fleet.site_of(count, stack.data / "native", DEVICES=card) as made:
        figures = scenario(made)
        assert figures.ok, figures.line()
