"""The coordinator of a process on its own, over the model in memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from serving.coordination import wire
from serving.coordination.contract import Claim, Granted, Place, QueueTimeout, Refused, Slots, Used, Waiting
from serving.coordination.held import Held
from serving.coordination.model.model import Model

log = logging.getLogger(__name__)

T = TypeVar("T")
Arguments = Callable[
    [int, int], list[Any]
]  # for limits and slots divided by so many processes; after process and epoch

BEAT_S = 1.0
ASKED_AT_ONCE = 1000  # places told in one heartbeat


class LocalCoordinator:
    """Limits, queue and slots for one process, all of them its own."""

    def __init__(self, instance: str) -> None:
        self._process = f"{''.join(instance.split())}-{uuid.uuid4().hex[:12]}"  # another one after every start
        self._scopes = wire.Scopes()
        self._model = Model()
        self._model_epoch = 0
        self._held: dict[str, Held] = {}
        self._depths: dict[str, int] = {}
        self._slots: dict[str, int] = {}
        self._clock = (time.time(), time.monotonic())  # the same moment by the shared clock and by ours
        self._beats: asyncio.Task[None] | None = None
        self._shares = 1  # among how many processes limits are divided here
        self.since = time.time()  # when it became alone or ceased to be
        self._enter_model()

    # -- what is known

    @property
    def alone(self) -> bool:
        return False

    @property
    def processes(self) -> int:
        return self._shares

    def in_use(self, replica_id: str) -> int:
        return self._slots.get(replica_id, 0)

    def place(self, request_id: str) -> Place | None:
        held = self._held.get(request_id)
        return held.place if held else None

    def wake(self, deployment_id: str) -> None:
        """The controller listens at Valkey."""
        log.warning("deployment %s was asked for and sleeps; it cannot be woken without Valkey", deployment_id)

    def waiting(self, pool: str) -> int:
        return self._depths.get(pool, 0)

    # -- life

    async def start(self) -> None:
        self._beats = asyncio.create_task(self._beat_always(), name="coordination-heartbeat")

    async def stop(self) -> None:
        """Give back everything this process holds."""
        if self._beats:
            self._beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beats
        for request_id in list(self._held):
            self.settle(request_id, None)

    async def _beat_always(self) -> None:
        while True:
            self._beat()
            await asyncio.sleep(BEAT_S)

    # -- requests

    async def admit(self, claim: Claim) -> Granted | Waiting | Refused:
        """Decide about a request. A task that is cancelled meanwhile leaves nothing reserved."""
        held = self._held[claim.id] = Held(claim)

        def arguments(processes: int, sharers: int) -> list[Any]:
            held.windows_at = self._now()
            return held.arguments("", 0, self._scopes, processes, sharers)[2:]

        try:
            return await self._ask(held, "admit", arguments, lambda reply: self._decided(held, reply))
        except asyncio.CancelledError:
            self.settle(claim.id, None)
            raise

    async def granted(self, request_id: str, timeout_s: float) -> Granted:
        """The turn of a Waiting request. Raises QueueTimeout, after which it is settled as refused."""
        held = self._held[request_id]
        if held.granted:
            return held.granted
        held.waiter = asyncio.get_running_loop().create_future()
        await asyncio.wait((held.waiter,), timeout=max(0.0, timeout_s))
        if held.granted:
            return held.granted
        granted = await self._ask(held, "timeout", lambda *_: [request_id], lambda reply: self._timed_out(held, reply))
        if isinstance(granted, QueueTimeout):
            raise granted
        return granted

    async def move(
        self, request_id: str, pool: str, candidates: tuple[Slots, ...], *, least: bool
    ) -> Granted | Waiting:
        """Give its slots back and take others, ahead of who waits, for another attempt. Limits stay reserved."""
        held = self._held[request_id]
        held.asking = True

        def arguments(_processes: int, sharers: int) -> list[Any]:
            return [request_id, pool, wire.candidates(candidates, sharers), least]

        def take(reply: list[Any]) -> Granted | Waiting:
            held.moved(pool, candidates, least)
            return self._let_in(held, reply)

        return await self._ask(held, "move", arguments, take)

    def settle(self, request_id: str, used: Used | None) -> None:
        """The request is over: correct what was reserved, free its slots or its place, wake who is next."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._settle(held, used)

    def _settle(self, held: Held, used: Used | None) -> None:
        if held.first:  # nothing was decided here yet
            return
        amounts = [used.input_tokens, used.output_tokens, used.cost] if used else False
        batch = self._model.batches.get(self._process, 0) + 1
        self._in_model("settle", [batch, [[held.claim.id, amounts, held.budgets]]], epoch=False)

    # -- answers

    def _decided(self, held: Held, reply: list[Any]) -> Granted | Waiting | Refused:
        if reply[0] in ("granted", "waiting"):
            return self._let_in(held, reply)
        del self._held[held.claim.id]
        outcome = wire.decision(reply, held.candidates)
        if isinstance(outcome, Refused) and outcome.reason == "queue_full":
            self._depths[held.pool] = outcome.depth
        return outcome

    def _let_in(self, held: Held, reply: list[Any]) -> Granted | Waiting:
        outcome = held.decided(reply)
        self._slots.update(outcome.in_use)
        if isinstance(outcome, Granted):
            self._slots[outcome.replica_id] = self._slots.get(outcome.replica_id, 0) + held.slots
        else:
            self._depths[held.pool] = outcome.depth
        return outcome

    def _timed_out(self, held: Held, reply: list[Any]) -> Granted | QueueTimeout:
        """Its time was up; its turn may have come in the same moment."""
        if reply[0] == "granted":
            return held.turn_came(reply[1], reply[2], reply[3])
        del self._held[held.claim.id]
        if reply[0] == "unknown":
            return QueueTimeout(1, 0)
        self._depths[held.pool] = reply[2]
        return QueueTimeout(reply[1], reply[2])

    def _turn(self, message: list[Any]) -> None:
        """Slots were given to a request that waits; one that left meanwhile has given them back by settling."""
        request_id, replica, slots, in_use = message
        held = self._held.get(request_id)
        if held is not None and not held.granted:
            held.turn_came(replica, slots, in_use)

    # -- the model

    async def _ask(self, held: Held, function: str, arguments: Arguments, take: Callable[[list[Any]], T]) -> T:
        """Call a function for a request, `take` its answer at once, and return what that made of it."""
        return take(self._ask_model(function, arguments))

    def _ask_model(self, function: str, arguments: Arguments) -> list[Any]:
        while (reply := self._in_model(function, arguments(self._shares, self._shares)))[0] == "clock":
            pass  # an hour began between two looks at the clock
        return reply

    def _in_model(self, function: str, rest: list[Any], epoch: bool = True) -> list[Any]:
        who = [self._process, self._model_epoch] if epoch else [self._process]
        reply = self._model.call(function, [*who, *rest], self._now())
        published, self._model.pools.published = self._model.pools.published, []
        for _, message in published:
            self._turn(message)
        return reply

    def _enter_model(self) -> None:
        """Begin to decide here, with all that this process holds."""
        self._model_epoch += 1
        self._in_model("hello", [])
        live = [held for held in self._held.values() if not held.first]
        entries = [
            held.entry(self._process, self._model_epoch, self._scopes, self._shares, self._shares) for held in live
        ]
        self._in_model("restore", [[held.claim.id for held in live], entries])

    def _beat(self) -> None:
        self._clock = (time.time(), time.monotonic())
        self._heard(self._in_model("beat", [self._asked_for()]))
        self._model.forget_idle()

    def _asked_for(self) -> list[str]:
        waiting = (request_id for request_id, held in self._held.items() if held.waiting and not held.asking)
        return [request_id for request_id, _ in zip(waiting, range(ASKED_AT_ONCE), strict=False)]

    def _heard(self, reply: list[Any]) -> bool:
        """Take the answer to a heartbeat. False: it knows nothing of a request that waits."""
        _, _, depths, slots, standings = reply
        self._depths, self._slots = wire.pairs(depths), wire.pairs(slots)
        for request_id, standing, *told in standings:
            held = self._held.get(request_id)
            if held is None or held.asking or not held.waiting:
                continue
            if standing == "unknown":
                return False
            if standing == "granted":
                self._turn([request_id, told[0], told[1], []])
            else:
                held.place = Place(told[0], self._depths.get(held.pool, 1))
        return True

    def _now(self) -> float:
        """Seconds since the epoch, by the shared clock as far as it is known."""
        return self._clock[0] + time.monotonic() - self._clock[1]
