"""The library in Valkey decides as the model in memory does, op by op, under a clock of the test's own."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any
from zoneinfo import available_timezones

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serving.coordination.calendar import bounds
from serving.coordination.library import Library
from serving.coordination.model.model import Model
from serving.coordination.model.queue import QUANTUM
from tests.private_valkey import PrivateValkey, running

PROCESSES = ("g1", "g2", "g3")
SCOPES = ("key:k1", "key:k2", "tenant:t1")
POOLS = {"d1": ("r1", "r2"), "d2": ("r3",)}
START = 1_800_000_000.25
LIBRARY = Library(lambda source: source.replace("redis.call('TIME')", "redis.call('LRANGE', 'test:now', 0, 1)"))
UNLIMITED = 10**6


@pytest.fixture(scope="module")
def valkey() -> Iterator[PrivateValkey]:
    with running() as valkey:
        yield valkey


class Twin:
    """The library and the model, called alike."""

    def __init__(self, valkey: PrivateValkey) -> None:
        self.client = valkey.client()
        self.client.function_load(LIBRARY.source, replace=True)
        self.pubsub = self.client.pubsub()
        self.pubsub.psubscribe("fl:g:c:*", "test:mark")
        self.begin()

    def begin(self) -> None:
        self.client.flushall()
        self.model = Model()
        self.now = START
        self.messages()

    def close(self) -> None:
        self.pubsub.close()
        self.client.close()

    def call(self, name: str, *args: Any) -> Any:
        """Its answer, the same from both, messages to processes included."""
        micro = round(self.now * 1_000_000)
        self.client.delete("test:now")
        self.client.rpush("test:now", micro // 1_000_000, micro % 1_000_000)
        reply = self.client.fcall(f"{LIBRARY.name}_{name}", 0, msgspec.msgpack.encode(args))  # type: ignore[arg-type]
        answer = self.normal(name, msgspec.msgpack.decode(reply))
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(args))
        expected = self.normal(name, self.model.call(name, copy, micro // 1_000_000 + micro % 1_000_000 / 1_000_000))
        assert answer == expected
        published, self.model.pools.published = self.model.pools.published, []
        expected_messages = sorted([process, message] for process, message in published)
        assert sorted(self.messages()) == expected_messages
        return answer

    def messages(self) -> list[Any]:
        self.client.publish("test:mark", "")
        found = []
        while True:
            message = self.pubsub.get_message(timeout=10)
            assert message is not None
            if message["type"] == "pmessage":
                if message["channel"] == b"test:mark":
                    return found
                process = message["channel"].decode().removeprefix("fl:g:c:")
                found.append([process, msgspec.msgpack.decode(message["data"])])

    @staticmethod
    def normal(name: str, reply: Any) -> Any:
        """Hashes have no order."""
        reply = msgspec.msgpack.decode(msgspec.msgpack.encode(reply))
        for index in {"beat": (2, 3), "read": (3, 4)}.get(name, ()):
            if len(reply) > index:
                flat = reply[index]
                reply[index] = {flat[place]: int(flat[place + 1]) for place in range(0, len(flat), 2)}
        return reply


limit = st.sampled_from((-1, -1, 0, 2, 5))
tokens_limit = st.sampled_from((-1, -1, 500, 3000))


class Coordination(RuleBasedStateMachine):
    twin: Twin

    def __init__(self) -> None:
        super().__init__()
        self.twin.begin()
        self.epochs = dict.fromkeys(PROCESSES, 1)
        self.batches = dict.fromkeys(PROCESSES, 0)
        self.live: dict[str, tuple[str, list[Any]]] = {}  # id -> process, arguments
        self.count = 0
        for process in PROCESSES:
            self.twin.call("hello", process, 1)

    def arguments(self, data: st.DataObject, process: str, request: str) -> list[Any]:
        pool = data.draw(st.sampled_from(sorted(POOLS)))
        hour = int(self.twin.now) // 3600 * 3600
        scopes = []
        for name in data.draw(st.sets(st.sampled_from(SCOPES), max_size=3)):
            amount = data.draw(st.sampled_from((0, 10**15, 3 * 10**9)))
            budgets = [[f"{name}:USD:hour:{hour}", "hour", amount, hour, hour + 3600]] if amount else []
            if data.draw(st.booleans()):
                budgets.append([f"{name}:USD:total:0", "total", 5 * 10**9, 0, 0])
            scopes.append(
                [name, data.draw(limit), *(data.draw(tokens_limit) for _ in range(3)), data.draw(limit), budgets]
            )
        candidates = [[replica, data.draw(st.sampled_from((0, 1, 3)))] for replica in POOLS[pool]]
        if data.draw(st.booleans()):
            candidates = candidates[::-1][: data.draw(st.integers(1, 2))]
        return [
            process,
            self.epochs[process],
            request,
            scopes,
            data.draw(st.integers(0, 400)),
            data.draw(st.integers(1, 2500)),
            data.draw(st.sampled_from((0, 1, 10**9, 2**52 + 1))),
            pool,
            candidates,
            data.draw(st.booleans()),
            data.draw(st.sampled_from((1, 1, 1, 2, 9))),
            data.draw(st.sampled_from(("t1", "t2", "t3"))),
            data.draw(st.sampled_from((1, 100, 250))),
            data.draw(st.integers(1, 3)),
            data.draw(st.sampled_from((0, 3, 50))),
            data.draw(st.sampled_from((2000, 10**6))),
            data.draw(st.sampled_from(("", "f1", "f2"))),
        ]

    @rule(data=st.data(), process=st.sampled_from(PROCESSES))
    def admit(self, data: st.DataObject, process: str) -> None:
        self.count += 1
        args = self.arguments(data, process, f"q{self.count}")
        answer = self.twin.call("admit", *args)
        if answer[0] in ("granted", "waiting"):
            self.live[args[2]] = process, args

    @precondition(lambda self: self.live)
    @rule(data=st.data(), refused=st.booleans())
    def settle(self, data: st.DataObject, refused: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        process, args = self.live.pop(request)
        self.batches[process] += 1
        used = False if refused else [args[4], data.draw(st.integers(0, 3000)), data.draw(st.integers(0, 10**9))]
        settlement = [request, used, [budget[0] for scope in args[3] for budget in scope[6]]]
        self.twin.call("settle", process, self.batches[process], [settlement])
        if data.draw(st.booleans()):
            assert self.twin.call("settle", process, self.batches[process], [settlement]) == [0], "seen before"
        if data.draw(st.booleans()):
            self.batches[process] += 1
            self.twin.call("settle", process, self.batches[process], [settlement])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def timeout(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        process, _ = self.live[request]
        answer = self.twin.call("timeout", process, self.epochs[process], request)
        if answer[0] != "granted":
            del self.live[request]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), least=st.booleans())
    def move(self, data: st.DataObject, least: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        process, _ = self.live[request]
        pool = data.draw(st.sampled_from(sorted(POOLS)))
        candidates = [[replica, data.draw(st.sampled_from((0, 1, 3)))] for replica in POOLS[pool]]
        self.twin.call("move", process, self.epochs[process], request, pool, candidates, least)

    @rule(process=st.sampled_from(PROCESSES))
    def beat(self, process: str) -> None:
        waiting = sorted(request for request, (owner, _) in self.live.items() if owner == process)
        answer = self.twin.call("beat", process, self.epochs[process], waiting)
        assert answer == ["stranger"] or answer[1] >= 1

    @rule(process=st.sampled_from(PROCESSES), data=st.data())
    def reconnect(self, process: str, data: st.DataObject) -> None:
        self.epochs[process] += 1
        own = {request: args for request, (owner, args) in self.live.items() if owner == process}
        kept = {request for request in own if data.draw(st.booleans())}
        assert self.twin.call("hello", process, self.epochs[process])[0] == self.batches[process]
        entries = []
        for request in sorted(kept):
            replica = data.draw(st.sampled_from(("", *POOLS[own[request][7]])))
            own[request][1] = self.epochs[process]
            entries.append([own[request], replica, 1 if replica else 0])
        self.twin.call("restore", process, self.epochs[process], sorted(kept), entries)
        for request in own.keys() - kept:
            del self.live[request]

    @rule(seconds=st.sampled_from((0.000001, 0.3, 1, 2.5, 10, 59.75, 61, 200, -30, -3600, 3600)))
    def time_passes(self, seconds: float) -> None:
        self.twin.now += seconds

    @rule(data=st.data(), name=st.sampled_from(SCOPES))
    def correct(self, data: st.DataObject, name: str) -> None:
        budget = f"{name}:USD:total:0"
        spent = self.twin.call("read", [], [budget])[2][0][1]
        read = data.draw(st.sampled_from((spent, "17")))
        self.twin.call("correct", budget, read, data.draw(st.sampled_from((spent, "123456789"))))

    @invariant()
    def books_are_sound(self) -> None:
        hour = int(self.twin.now) // 3600 * 3600
        budgets = [f"{name}:USD:{window}" for name in SCOPES for window in (f"hour:{hour}", "total:0")]
        _, scopes, money, _, _ = self.twin.call("read", list(SCOPES), budgets)
        assert all(amount >= 0 for scope in scopes for amount in scope)
        assert all(int(reserved) >= 0 for reserved, _ in money)

    def teardown(self) -> None:
        """When all is over nothing is left."""
        for process in PROCESSES:
            self.twin.call("hello", process, self.epochs[process] + 1)
            self.twin.call("restore", process, self.epochs[process] + 1, [], [])
        names = [f"{name}:USD:total:0" for name in SCOPES]
        _, scopes, money, depths, slots = self.twin.call("read", list(SCOPES), names)
        assert [scope[3] for scope in scopes] == [0, 0, 0]
        assert {reserved for reserved, _ in money} == {"0"}
        assert depths == {} and slots == {}
        super().teardown()


def test_library_decides_as_the_model_does(valkey: PrivateValkey) -> None:
    Coordination.twin = Twin(valkey)
    with contextlib.closing(Coordination.twin):
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            Coordination,
            settings=settings(
                max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )


@settings(max_examples=25, deadline=None)
@given(
    tenants=st.lists(st.tuples(st.sampled_from((50, 100, 100, 400)), st.integers(300, 4000)), min_size=2, max_size=5),
    slots=st.integers(1, 3),
)
def test_tenants_that_wait_are_served_by_weight(tenants: list[tuple[int, int]], slots: int) -> None:
    """Tokens served while all have requests waiting: within a round and one request of each tenant's share."""
    model = Model()
    model.call("hello", ["g1", 1], START)
    costs = {f"t{number}": cost for number, (_, cost) in enumerate(tenants)}
    total = sum(weight for weight, _ in tenants)
    rounds = 20  # at least; QUANTUM tokens at weight 100 in each
    running: list[tuple[str, str]] = []
    for number, (weight, cost) in enumerate(tenants):
        for index in range(math.ceil(rounds * QUANTUM * weight / 100 / cost) * 2 + 20):
            request = f"t{number}.{index}"
            args = ["g1", 1, request, [], 0, cost, 0, "d1", [["r1", slots]], False, 1]
            answer = model.call("admit", [*args, f"t{number}", weight, 1, 10**6, 10**9, ""], START)
            if answer[0] == "granted":
                running.append((f"t{number}", request))
    served: Counter[str] = Counter()
    for batch in range(1, 10**6):
        tenant, request = running.pop(0)
        model.call("settle", ["g1", batch, [[request, [0, 1, 0], []]]], START)
        for _, (granted, *_) in model.pools.published:
            tenant = granted.partition(".")[0]
            served[tenant] += costs[tenant]
            running.append((tenant, granted))
        model.pools.published.clear()
        if sum(served.values()) >= rounds * QUANTUM * total / 100:
            break
    everything = sum(served.values())
    for number, (weight, cost) in enumerate(tenants):
        slack = 2 * (QUANTUM * weight / 100 + cost) + 2 * max(costs.values())
        assert abs(served[f"t{number}"] - everything * weight / total) <= slack


# Where clocks are changed by half an hour, two of a year's hours overlap.
ZONES = st.sampled_from(sorted(available_timezones() - {"Australia/Lord_Howe", "Australia/LHI"}))


@given(now=st.floats(1_600_000_000, 4_000_000_000), zone=ZONES, window=st.sampled_from(("hour", "day", "month")))
def test_windows_hold_the_moment_and_join_without_gaps(now: float, zone: str, window: str) -> None:
    start, end = bounds(window, zone, now)
    assert start <= now < end
    assert bounds(window, zone, start) == (start, end), "the same all through"
    assert bounds(window, zone, end)[0] == end, "the next begins where this ends"


@given(
    gaps=st.lists(st.one_of(st.floats(0, 3), st.floats(0, 70)), min_size=20, max_size=120),
    limit=st.integers(1, 12),
    kept=st.lists(st.booleans(), min_size=1),
)
def test_no_60_seconds_hold_more_than_the_limit(gaps: list[float], limit: int, kept: list[bool]) -> None:
    """Wherever they begin, and though some requests are taken back as never made."""
    model, now = Model(), START
    model.call("hello", ["g1", 1], now)
    counted: list[float] = []
    for number, gap in enumerate(gaps):
        now += gap
        scope = ["key:k1", limit, -1, -1, -1, -1, []]
        args = ["g1", 1, f"q{number}", [scope], 5, 5, 0, "d1", [["r1", 0]], False, 1, "t1", 100, 1, 9, 999, ""]
        answer = model.call("admit", args, now)
        if answer[0] == "granted":
            stays = kept[number % len(kept)]
            model.call("settle", ["g1", number + 1, [[f"q{number}", [1, 1, 0] if stays else False, []]]], now)
            counted += [now] * stays
        else:
            assert answer[2] == "requests_per_minute"
            now += answer[6] + (answer[6] == 60)  # a Retry-After says 60 at most, a bucket counts for up to 61 s
            assert model.call("admit", args, now)[0] == "granted", "as Retry-After promised"
            counted.append(now)
    for begin in counted:
        assert sum(begin <= moment < begin + 60 for moment in counted) <= limit
