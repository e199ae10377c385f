"""Answers that are kept for as long as they are worth."""

from __future__ import annotations

import threading
import time

from console.telemetry.kept import Kept


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_dear_answer_is_made_once_for_all_who_want_it() -> None:
    clock = Clock()
    kept: Kept[int] = Kept(clock=clock)
    made: list[int] = []

    def make() -> int:
        made.append(1)
        time.sleep(0.05)  # the others come meanwhile
        clock.now += 0.5
        return len(made)

    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(kept.get("a", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1] * 8 and len(made) == 1
    assert kept.pause("a") == 5.0
    clock.now += 4.9
    assert kept.get("a", make) == 1
    clock.now += 0.2
    assert kept.get("a", make) == 2


def test_a_cheap_answer_is_hardly_kept() -> None:
    clock = Clock()
    kept: Kept[int] = Kept(clock=clock)
    kept.get("a", lambda: 1)
    clock.now += 0.001
    assert kept.get("a", lambda: 2) == 2


def test_a_failure_is_not_kept() -> None:
    kept: Kept[int] = Kept(floor_s=60)
    for _ in range(2):
        try:
            kept.get("a", lambda: 1 // 0)
        except ZeroDivisionError:
            continue
    assert kept.get("a", lambda: 3) == 3
    assert kept.get("a", lambda: 4) == 3
    kept.clear()
    assert kept.get("a", lambda: 5) == 5
