"""Run a coroutine at once, as far as it goes without waiting.

Most sends to a client and most reads of a request that has arrived wait for nothing. Driving them here instead of in a
Task of their own saves a turn of the event loop each, which is most of what a token costs. Python 3.12 has eager tasks;
this is the part of them that 3.11 needs. Only for coroutines that do not look at the current task (no asyncio.timeout).
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Work = Coroutine[Any, Any, T]


class Driven:
    """A coroutine that runs from callbacks. `done(result, error)` is called once, perhaps before `start` returns."""

    __slots__ = ("_done", "_waits_for", "_work")

    def __init__(self, work: Work[Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._work = work
        self._done = done
        self._waits_for: asyncio.Future[Any] | None = None

    def start(self) -> bool:
        """Run it up to its first wait; returns whether it is over already."""
        return self._step(None)

    def close(self) -> None:
        """Drop it where it stands; `done` is not called."""
        if self._waits_for is not None:
            self._waits_for.remove_done_callback(self._step)
            self._waits_for = None
        self._work.close()
        self._done = _ignore  # it leads back to who holds this: without it nothing of a request waits for the collector

    def _step(self, _ready: asyncio.Future[Any] | None) -> bool:
        self._waits_for = None
        try:
            pending = self._work.send(None)
        except StopIteration as stop:
            self._done(stop.value, None)
            return True
        except Exception as error:  # noqa: BLE001 - handed over, not swallowed
            self._done(None, error)
            return True
        if pending is None:  # a bare yield, as of sleep(0): go on in the next turn
            asyncio.get_running_loop().call_soon(self._step, None)
            return False
        pending._asyncio_future_blocking = False  # what a Task does to take a future over
        self._waits_for = pending
        pending.add_done_callback(self._step)
        return False


def _ignore(_result: Any, _error: BaseException | None) -> None:
    """Nobody is told any more."""


def begin(work: Work[T]) -> tuple[bool, T | None, Work[T] | None]:
    """Run it up to its first wait. Returns (True, its result, None), or (False, None, the rest to await)."""
    try:
        pending = work.send(None)
    except StopIteration as stop:
        return True, stop.value, None
    return False, None, _rest(work, pending)


async def _rest(work: Work[T], pending: Any) -> T:
    return await _resumed(work, pending)


@types.coroutine
def _resumed(work: Work[T], pending: Any) -> Generator[Any, Any, T]:
    """Go on with a coroutine that has begun and waits for `pending`; cancelling reaches into it."""
    while True:
        thrown: BaseException | None = None
        sent: Any = None
        try:
            sent = yield pending
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:  # noqa: BLE001 - thrown into the coroutine, which is the point
            thrown = error
        try:
            pending = work.send(sent) if thrown is None else work.throw(thrown)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
