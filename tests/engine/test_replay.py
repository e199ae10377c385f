"""Recorded steps: played again they decide the same; a changed decision is found at its line."""

from __future__ import annotations

import json

import pytest

from engine.waiting import WaitingQueue
from tests.engine import replay as module
from tests.engine.replay import RecordedScheduler, replay
from tests.engine.schedules import World, seeded


def recorded(seed: int) -> RecordedScheduler:
    world = World(seeded(seed), RecordedScheduler)
    world.play()
    assert isinstance(world.scheduler, RecordedScheduler)
    return world.scheduler


def test_what_was_recorded_is_decided_again() -> None:
    """Over schedules with swaps, deadlines, grammars, aborts, failed steps and loans."""
    kinds: set[str] = set()
    for seed in range(60):
        scheduler = recorded(seed)
        assert replay(scheduler.lines) == scheduler.counts.steps
        kinds |= {next(iter(json.loads(line))) for line in scheduler.lines}
    assert kinds == {"pools", "add", "refresh", "abort", "step", "sampled", "failed", "limit"}


def test_another_decision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for seed in range(20) for line in recorded(seed).lines]
    monkeypatch.setattr(WaitingQueue, "head", lambda self: max(self, key=lambda s: s.order, default=None))
    with pytest.raises(AssertionError, match="another decision than recorded"):
        replay(lines)


def test_a_recording_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 10)
    scheduler = recorded(1)
    assert (len(scheduler.lines), scheduler.whole) == (10, False)
