"""Live numbers for sockets: one computation per scope and range in a process, however many people look."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from django.utils import timezone, translation

from console.base.middleware import zone_of
from console.base.sockets import off_loop
from console.dashboards import overview
from console.errors import first_line
from console.telemetry.scope import Scope

log = logging.getLogger(__name__)

STALE = '{"type":"stale"}'
_PATIENCE_S = 8.0  # then watchers are told that the numbers are old; the query itself is bounded by the server


class View(NamedTuple):
    """How a viewer wants it: language and zone."""

    language: str
    zone: str


@dataclass(eq=False)
class Watcher:
    """One socket. Holds only the newest message: a slow reader skips, it never queues."""

    view: View
    newest: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: str) -> None:
        """Replace whatever has not been taken."""
        self.newest = message
        self.ready.set()

    async def get(self) -> str:
        """Wait for a message newer than the last that was taken."""
        await self.ready.wait()
        self.ready.clear()
        return self.newest


class Feed:
    """Computes while somebody watches, at most twice a second, and less often when it is dear."""

    def __init__(self, scope: Scope, key: str) -> None:
        self.scope, self.key = scope, key
        self.watchers: set[Watcher] = set()
        self.task: asyncio.Task[None] | None = None
        self._trouble = ""

    async def run(self) -> None:
        """Until nobody watches. What cannot be made is told as stale and tried again."""
        while self.watchers:
            views = {w.view for w in self.watchers}
            work = asyncio.ensure_future(off_loop(messages, self.scope, self.key, views))
            while True:
                done, _pending = await asyncio.wait({work}, timeout=_PATIENCE_S)
                if done:
                    break
                self._tell_all(STALE)
            error = work.exception()
            if error is None:
                self._trouble = ""
                ready = work.result()
                for watcher in self.watchers:
                    if watcher.view in ready:
                        watcher.put(ready[watcher.view])
            else:
                self._note(error)
                self._tell_all(STALE)
            await asyncio.sleep(overview.kept.pause((self.scope, self.key)))

    def _note(self, error: BaseException) -> None:
        """Log a trouble once, not each time that it is met again."""
        trouble = first_line(error)
        if trouble != self._trouble:
            log.warning("overview: numbers of %s could not be made: %s", self.key, trouble, exc_info=error)
        self._trouble = trouble

    def _tell_all(self, message: str) -> None:
        for watcher in self.watchers:
            watcher.put(message)


def messages(scope: Scope, key: str, views: set[View]) -> dict[View, str]:
    """One snapshot, told in every language and zone that is being looked at, encoded. Blocking."""
    snapshot = overview.newest(scope, key)
    series = overview.series(snapshot)
    told = {}
    for view in views:
        with translation.override(view.language), timezone.override(zone_of(view.zone)):
            message = {
                "type": "snapshot",
                "at": snapshot.at.timestamp(),
                "parts": overview.render(snapshot),
                "series": series,
            }
            told[view] = json.dumps(message, separators=(",", ":"))
    return told


class Hub:
    """The feeds of this process."""

    def __init__(self) -> None:
        self._feeds: dict[tuple[Scope, str], Feed] = {}

    def watch(self, scope: Scope, key: str, view: View) -> Watcher:
        """Join the feed of a scope and range, which begins with its first watcher."""
        feed = self._feeds.setdefault((scope, key), Feed(scope, key))
        watcher = Watcher(view)
        feed.watchers.add(watcher)
        if feed.task is None or feed.task.done():
            feed.task = asyncio.ensure_future(feed.run())
        return watcher

    def leave(self, scope: Scope, key: str, watcher: Watcher) -> None:
        """The last to leave ends the feed."""
        feed = self._feeds.get((scope, key))
        if feed is None:
            return
        feed.watchers.discard(watcher)
        if not feed.watchers:
            del self._feeds[(scope, key)]
            if feed.task is not None:
                feed.task.cancel()

    def __len__(self) -> int:
        return len(self._feeds)


hub = Hub()
