"""Ends of workers, beside the controller's loop: streams may take long, and the others need looking after."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from uuid import UUID

from django.conf import settings

from console.fleet import stacks
from console.fleet.models import Replica, StackCapture
from engine.launchers.base import Launcher

GRACE_S = 5.0  # beyond what a worker gives its own streams


@dataclass
class _Dying:
    """A hung worker whose stacks are being read, before it is killed."""

    epoch: int
    reason: str
    capture: stacks.Capture


class Endings:
    """Ends under way, one a replica."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._draining: dict[UUID, threading.Thread] = {}
        self._dying: dict[UUID, _Dying] = {}

    def drain(self, replica: Replica) -> None:
        """Tell a worker to end, and see to it that it does. Idempotent."""
        running = self._draining.get(replica.id)
        if running is not None and running.is_alive():
            return
        grace_s = settings.ENV["DRAIN_SECONDS"] + GRACE_S
        ending = threading.Thread(
            target=self._launcher.end, args=(str(replica.id), grace_s), name="end", daemon=True
        )  # nothing waits for it: who takes over does it again
        self._draining[replica.id] = ending
        ending.start()

    def kill(self, replica: Replica) -> None:
        """End a worker at once."""
        self._launcher.kill(str(replica.id))

    def autopsy(self, replica: Replica, reason: str) -> None:
        """Have the stacks of a hung worker read; `look` kills it and keeps them once that has ended. Idempotent."""
        dying = self._dying.get(replica.id)
        if dying is None or dying.epoch != replica.epoch:
            family = self._launcher.family(str(replica.id))
            self._dying[replica.id] = _Dying(replica.epoch, reason, stacks.Capture(family))

    def look(self, replica: Replica) -> bool:
        """End a worker whose stacks have been read. Returns whether it did; raises DatabaseError, to do it again."""
        dying = self._dying.get(replica.id)
        if dying is None or dying.capture.is_alive():
            return False
        if dying.epoch == replica.epoch:
            StackCapture.objects.create(
                replica=replica, epoch=dying.epoch, reason=dying.reason, text=dying.capture.text
            )
            self._launcher.kill(str(replica.id))
        del self._dying[replica.id]
        return True

    def join(self) -> None:
        """Wait for all of them; for tests that leave nothing behind."""
        for ending in self._draining.values():
            ending.join()
