"""Workers that fail and a fleet that changes, under load, on a whole installation: the bars of bench/fleet.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from bench import fleet
from bench.fleet import Figures, Site
from bench.stack import Stack

pytestmark = pytest.mark.timeout(600)

# Each of the others costs a minute or more; bench/fleet.py has them, rollouts on full cards too.
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


def test_a_lender_keeps_to_its_loan_and_has_it_back_when_it_needs_it(stack: Stack) -> None:
    """R16: the second of two replicas lives on what the first lends it of a simulated card that cannot hold both."""
    count, settings = next(how for scenario, *how in fleet.ON_CARDS if scenario is fleet.lent)
    with fleet.site_of(count, stack.data / "native", **settings) as site:
        figures = fleet.lent(site)
    assert figures.ok, figures.line()
