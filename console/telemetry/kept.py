"""Dear answers, kept in this process for as long as they are worth: whoever reloads gets the one that was just made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")

SHARE = 10  # an answer is kept for ten times what it cost: asking for it without pause takes a tenth of one core
CEILING_S = 15.0
_FORGET_S = 60.0


class Kept(Generic[V]):
    """Answers by key. One thread makes an answer while others that want the same one wait for it."""

    def __init__(self, floor_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._floor_s = floor_s
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[Hashable, tuple[float, float, V]] = {}  # good until, cost, answer
        self._makers: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The kept answer while it is fresh, else a new one."""
        with self._lock:
            maker = self._makers.setdefault(key, threading.Lock())
        with maker:
            kept = self._answers.get(key)
            if kept and self._clock() < kept[0]:
                return kept[2]
            began = self._clock()
            answer = make()
            cost = self._clock() - began
            with self._lock:
                self._answers[key] = (self._clock() + self._worth(cost), cost, answer)
                self._forget()
            return answer

    def pause(self, key: Hashable) -> float:
        """How long its newest answer stays good, in seconds."""
        kept = self._answers.get(key)
        return self._worth(kept[1]) if kept else self._floor_s

    def clear(self) -> None:
        with self._lock:
            self._answers.clear()

    def _worth(self, cost: float) -> float:
        return min(max(self._floor_s, SHARE * cost), CEILING_S)

    def _forget(self) -> None:
        now = self._clock()
        for key in [k for k, (until, _cost, _answer) in self._answers.items() if now > until + _FORGET_S]:
            del self._answers[key]
            self._makers.pop(key, None)
