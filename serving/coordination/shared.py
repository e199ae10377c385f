"""The coordinator over Valkey, which goes on by itself while Valkey is away.

Away, requests are decided by the model in memory, with every limit and every replica's slots divided by the processes
last known; slots stay divided for a moment after the return, until the others are back too. What was spent meanwhile is
reported when Valkey is back, and what lives then is put back there: each connection has an epoch, so that nothing said
on an older one counts after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from serving.coordination.contract import Coordinator, Used
from serving.coordination.coordinator import Arguments, LocalCoordinator
from serving.coordination.held import Held
from serving.coordination.library import Library
from serving.coordination.valkey import CONNECT_S, Address, Away, Link, connect

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH = 200  # settlements or restored requests in one call: bounds how long Valkey is busy with it
BACKLOG = 100_000  # settlements that wait for Valkey to come back; the oldest are dropped, and corrected by the ledger
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 0.5  # between attempts to connect
SETTLED_S = LAST_PAUSE_S + CONNECT_S + 0.5  # after a return: by then every process that lives is back too


class SharedCoordinator(LocalCoordinator):
    """Decides with all other gateways on the same Valkey."""

    def __init__(self, url: str, instance: str, library: Library | None = None) -> None:
        super().__init__(instance)
        self._address = Address(url)
        self._library = library or Library()
        self._link: Link | None = None  # what is asked; None while alone
        self._epoch = 0
        self._keeper: asyncio.Task[None] | None = None
        self._batch = 0
        self._outgoing: deque[list[Any]] = deque(maxlen=BACKLOG)  # settlements not sent yet
        self._unanswered: deque[tuple[int, list[Any]]] = deque()  # batches sent, by number
        self._flush_due = False
        self._undecided = False  # whether a settlement not sent yet is of a request that was not answered
        self._settled_at = 0.0  # of the monotonic clock: until then slots are still shared out
        self.dropped = 0  # settlements that the backlog could not keep

    @property
    def alone(self) -> bool:
        return self._link is None

    # -- life

    async def start(self) -> None:
        """Connect if Valkey is there; where it is not, begin alone and go on trying."""
        first = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep_connected(first), name="coordination-connection")
        await first.wait()
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        if self._keeper:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._link is not None:
            self._flush()
            link, self._link = self._link, None
            left = asyncio.Event()
            link.call("goodbye", [self._process, self._epoch], lambda _: left.set())
            await left.wait()
            link.close()

    async def _keep_connected(self, first: asyncio.Event) -> None:
        pause, told = FIRST_PAUSE_S, False
        while True:
            lost = asyncio.Event()
            try:
                link = await connect(
                    self._address,
                    self._library,
                    f"fl:g:c:{self._process}",
                    self._turn,
                    functools.partial(self._lost, lost),
                )
                await self._join(link)
                log.info("Valkey at %s is used by this gateway, one of %d.", self._address, self._shares)
                pause, told = FIRST_PAUSE_S, False
                first.set()
                await lost.wait()
            except Away as error:
                if not told:
                    log.warning("%s Limits are divided by %d until it is back.", error, self._shares)
                told = True
                first.set()
                await asyncio.sleep(pause)
                pause = min(LAST_PAUSE_S, pause * 2)

    async def _join(self, link: Link) -> None:
        """Say hello, and begin to use the connection in the moment that it is answered. Raises Away."""
        self._epoch += 1
        joined: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def answer(reply: list[Any] | None) -> None:
            if reply is not None:
                self._return(link, reply)
            if not joined.done():
                joined.set_result(reply is not None)

        link.call("hello", [self._process, self._epoch], answer)
        if not await joined:
            raise Away(f"Valkey at {self._address} did not answer.")

    def _return(self, link: Link, reply: list[Any]) -> None:
        """Tell Valkey what happened meanwhile and what lives now. From here on it decides."""
        seen, now, self._shares = reply
        self._clock = (now, time.monotonic())
        while self._unanswered and self._unanswered[0][0] <= seen:
            self._unanswered.popleft()
        self._link, self.since = link, time.time()
        if self._epoch > 1:  # the others may hold shares of which Valkey knows nothing before they are back as well
            self._settled_at = time.monotonic() + SETTLED_S
        for number, settlements in self._unanswered:
            self._send_batch(number, settlements)
        self._flush()
        live = [held for held in self._held.values() if not held.first]
        entries = [held.entry(self._process, self._epoch, self._scopes, 1, self._sharers()) for held in live]
        ids: list[str] | bool = [held.claim.id for held in live]
        for begin in range(0, max(1, len(entries)), BATCH):
            part = entries[begin : begin + BATCH]
            link.call("restore", [self._process, self._epoch, ids, part], self._restored)
            ids = False
        self._in_model("restore", [[], []])  # what was decided here is Valkey's now
        self._beat()

    def _restored(self, reply: list[Any] | None) -> None:
        if reply and self._link:
            self._link.close("it forgot this process")

    def _lost(self, lost: asyncio.Event) -> None:
        """A connection has ended, perhaps before it was used."""
        lost.set()
        if self._link is not None and self._link.lost:
            self._link, self.since = None, time.time()
            log.warning(
                "This gateway goes by its own share of every limit, 1 of %d, until Valkey is back.", self._shares
            )
            self._enter_model()

    # -- questions

    async def _ask(self, held: Held, function: str, arguments: Arguments, take: Callable[[list[Any]], T]) -> T:
        """As the base, in Valkey if it is there. The answer is taken when it is read, before later messages are."""
        link = self._link
        if link is None:
            return take(self._ask_model(function, arguments))
        taken: asyncio.Future[T] = link.loop.create_future()

        def answer(reply: list[Any] | None) -> None:
            if self._held.get(held.claim.id) is not held:
                taken.cancel()  # it was settled meanwhile
                return
            if reply and reply[0] == "clock":
                self._clock = (reply[1], time.monotonic())
                self._call(link, function, arguments, answer)
                return
            if reply and reply[0] in ("stranger", "unknown"):
                link.close("it forgot this process")
                reply = None
            outcome = take(self._ask_model(function, arguments) if reply is None else reply)
            if not taken.done():
                taken.set_result(outcome)

        self._call(link, function, arguments, answer)
        return await taken

    def _call(
        self, link: Link, function: str, arguments: Arguments, answer: Callable[[list[Any] | None], None]
    ) -> None:
        link.call(function, [self._process, self._epoch, *arguments(1, self._sharers())], answer)

    def wake(self, deployment_id: str) -> None:
        if self._link is None:
            super().wake(deployment_id)
        else:
            self._link.call("wake", [deployment_id], lambda _reply: None)

    def _sharers(self) -> int:
        """Among how many processes slots are divided now."""
        return self._shares if time.monotonic() < self._settled_at else 1

    def _beat(self) -> None:
        if self._link is None:
            super()._beat()
            return
        link = self._link

        def answer(reply: list[Any] | None) -> None:
            if reply is None:
                return
            if reply[0] == "stranger":
                link.close("it forgot this process")
                return
            self._clock, self._shares = (reply[0], time.monotonic()), reply[1]
            if not self._heard(reply):
                link.close("it forgot a request that waits")

        link.call("beat", [self._process, self._epoch, self._asked_for()], answer)

    # -- settlements

    def _settle(self, held: Held, used: Used | None) -> None:
        if self._link is None:
            super()._settle(held, used)
            if used is None:
                return  # a request that is not put back there is given back
        self._undecided |= held.asking
        if len(self._outgoing) == BACKLOG:
            self.dropped += 1
        amounts = [used.input_tokens, used.output_tokens, used.cost] if used else False
        self._outgoing.append([held.claim.id, amounts, held.budgets])
        if self._link is not None and not self._flush_due:
            self._flush_due = True
            self._link.loop.call_soon(self._flush_first)

    def _flush_first(self) -> None:
        """Send what was settled in this tick of the loop before what was asked in it, whose turn it may be then.

        A settlement of what was just asked must not overtake the question.
        """
        if self._link is not None:
            self._flush(first=not self._undecided)

    def _flush(self, first: bool = False) -> None:
        self._flush_due = self._undecided = False
        while self._outgoing and self._link is not None:
            settlements = [self._outgoing.popleft() for _ in range(min(BATCH, len(self._outgoing)))]
            self._batch += 1
            self._unanswered.append((self._batch, settlements))
            self._send_batch(self._batch, settlements, first)
            first = False  # batches keep their order

    def _send_batch(self, number: int, settlements: list[Any], first: bool = False) -> None:
        def answer(reply: list[Any] | None) -> None:
            if reply is not None:
                while self._unanswered and self._unanswered[0][0] <= number:
                    self._unanswered.popleft()

        assert self._link is not None
        self._link.call("settle", [self._process, number, settlements], answer, first=first)


def make(valkey_url: str | None, instance: str) -> Coordinator:
    """The coordinator of a gateway: over Valkey where a URL is set, else for this process as the only one."""
    return SharedCoordinator(valkey_url, instance) if valkey_url else LocalCoordinator(instance)
