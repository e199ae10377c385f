"""Answers that are kept for as long as they are worth."""

from __future__ import annotations

import threading
import time

from console.telemetry.kept import Kept


def test_a_dear_answer_is_made_once_for_all_who_want_it() -> None:
    kept: Kept[int] = Kept()
    made: list[int] = []

    def make() -> int:
        made.append(1)
        time.sleep(0.05)
        return len(made)

    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(kept.get("a", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1] * 8 and len(made) == 1
    assert 0.5 <= kept.pause("a") <= 5


def test_a_cheap_answer_is_hardly_kept() -> None:
    kept: Kept[int] = Kept()
    kept.get("a", lambda: 1)
    time.sleep(0.05)
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
