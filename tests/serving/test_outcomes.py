"""Each way to end, for each kind of engine, streaming and not: one usage record, its tokens and money, nothing held."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from serving import apikey, journal
from serving.metering import Billed
from serving.pipeline import Pipeline
from serving.port import Budget, Limits, Price, Settled
from serving.request import Request
from serving.shipper import Shipper
from tests.serving.conftest import chat, events
from tests.serving.fakes import KEY, MODEL, NARROW_KEY, OTHER_KEY, PRICE, SECRET, EngineCall, FakeEngine, Stack, running
from tests.serving.outcomes import CASES, IDS, ROWS, SO_FAR, Row, expected, told_status
from tests.serving.test_journal import Ledger
from tests.serving.wires import API_KEY, WIRES, engine_of

CHAT = "/v1/chat/completions"
DOCS = Path(__file__).parents[2] / "docs" / "metering.md"
LATER_NS = 10**15  # over every deadline of a route
PLENTY = 10**15


class Play:
    """One row on one engine."""

    def __init__(self, stack: Stack, engine: FakeEngine, row: Row, kind: str, stream: bool) -> None:
        self.stack = stack
        self.engine = engine
        self.row = row
        self.kind = kind
        self.stream = stream
        self.key = NARROW_KEY if row.prepare == "access" else KEY
        self.tenant = "tenant-3" if row.prepare == "access" else "tenant-1"
        self.response: httpx.Response | None = None
        self.body = ""

    @property
    def pipeline(self) -> Pipeline:
        pipeline = self.stack.gateway._pipeline
        assert pipeline is not None
        return pipeline

    @property
    def expected(self) -> Billed:
        return expected(self.row, self.kind, self.stream)

    async def __call__(self) -> None:
        """Let the request be asked, and end as its row says."""
        self._limit()
        async with self._occupied():
            self._script()
            asked = asyncio.create_task(self._ask())
            if self.row.how == "unread":
                await asked
                return
            if self.row.how != "engine":
                await self._end(asked, await self._reached())
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(asked, 10)

    def _limit(self) -> None:
        keys = dict(self.stack.snapshots.snapshot.keys)
        digest = apikey.digest(self.key, SECRET)
        few = 1 if self.row.prepare == "limit" else None
        limits = Limits(output_tokens_per_minute=few, budgets=(Budget("day", PLENTY),))
        keys[digest] = msgspec.structs.replace(keys[digest], limits=limits)
        self.stack.snapshots.change(keys=keys)

    def _script(self) -> None:
        async def script(call: EngineCall) -> None:
            if self.kind == "external":
                assert call.headers["authorization"] == f"Bearer {API_KEY}"
                assert not {"request_id", "cache_salt"} & call.body.keys()
            await self.row.script(WIRES[self.kind](call))

        self.engine.script = script

    @contextlib.asynccontextmanager
    async def _occupied(self) -> AsyncIterator[None]:
        """With the only slot taken by another tenant, if the row wants that."""
        if self.row.prepare != "occupied":
            yield
            return
        self._script()
        async with client_of(self.stack, OTHER_KEY) as client:
            other = asyncio.create_task(client.post(CHAT, json=chat()))
            await self.engine.call()
            yield
            other.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await other

    async def _ask(self) -> None:
        async with client_of(self.stack, self.key) as client:
            body = chat(stream=self.stream, max_tokens=100, **self.row.body)
            async with client.stream("POST", CHAT, json=body) as response:
                self.response = response
                if self.row.how == "unread":
                    await self.stack.idle()
                else:
                    self.body = (await response.aread()).decode()

    async def _reached(self) -> Request:
        """Until the engine has said its part, as far as the gateway can know."""
        async with asyncio.timeout(10):
            await self.engine.call()
            while True:
                for request in self.pipeline.in_flight.values():
                    counts = request.counts
                    if request.stamps.posted and counts.generated == self.expected.completion:
                        return request
                await asyncio.sleep(0.002)

    async def _end(self, asked: asyncio.Task[None], request: Request) -> None:
        match self.row.how:
            case "client":
                asked.cancel()
            case "die":
                self.engine.calls[0].die()
            case "deadline":
                self.pipeline.watched[request.id].check(request.stamps.posted + LATER_NS)
            case "stop":
                await self.stack.gateway.drain()
            case "kill":
                self._copy_journal()
                asked.cancel()

    def _copy_journal(self) -> None:
        """What a process that is killed at this moment leaves: its files, and their lock free."""
        root = self.stack.settings.journal_root
        shutil.copytree(root, root.with_name("killed"))

    async def entries(self) -> list[Settled]:
        """All that was settled for the row's tenant."""
        settled = await self.stack.settled()
        if self.row.how == "kill":
            ledger = Ledger()
            shipper = Shipper(self.stack.settings.journal_root.with_name("killed"), ledger)
            shipper.run_once()
            shipper.close()
            settled = list(ledger.rows.values())
        return [entry for entry in settled if entry.record.tenant_id == self.tenant]


def client_of(stack: Stack, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=20, verify=False)


@contextlib.asynccontextmanager
async def prepared(root: Path, row: Row, kind: str, stream: bool, **settings: Any) -> AsyncIterator[Play]:
    if row.how == "stop":
        settings["drain_s"] = 0.0
    if row.how == "unread":
        settings["unsent_bytes_limit"] = 200_000
    async with engine_of(kind, root) as (engine, replica), running(root, route_changes=row.route, **settings) as stack:
        changes: dict[str, Any] = {"max_num_seqs": 1} if row.prepare == "occupied" else {}
        if row.prepare == "state":
            changes["state"] = "loading"
        stack.snapshots.change(replicas={replica.id: msgspec.structs.replace(replica, **changes)})
        yield Play(stack, engine, row, kind, stream)


def owed(bill: Billed) -> int:
    """Nano-units at the price that the route had when the request came, rounded up."""
    uncached = bill.prompt - bill.cached
    pico = uncached * PRICE.input + bill.cached * PRICE.cached_input + bill.completion * PRICE.output
    return (pico + 999) // 1000


def nothing_is_held(play: Play, spent: int) -> None:
    """Reserved is 0, spent is what was billed, and every slot and place is free."""
    model = play.stack.gateway._coordinator._model  # type: ignore[attr-defined]
    amounts = list(model.budgets.amounts.values())
    assert [sum(each) for each in zip(*amounts, strict=True)] in ([], [0, spent])
    assert not model.pools.slots and not model.pools.queues
    assert not play.pipeline.watched
    assert journal.read_slots(play.pipeline.journal.directory / "slots") == {}
    assert [channel.in_flight for channel in play.pipeline.pool.channels()] in ([], [0])


def billed_as(entry: Settled, bill: Billed) -> None:
    usage, record = entry.usage, entry.record
    assert usage is not None
    assert Billed(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens) == bill
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (
        bill.prompt,
        bill.cached,
        bill.completion,
    )
    assert usage.cost == record.cost == owed(bill)
    assert (usage.outcome, usage.id) == (record.outcome, record.id)


def was_told(play: Play, entry: Settled) -> None:
    """What the client got is what the record says, and its id is the record's."""
    row, response = play.row, play.response
    if row.how == "client" and response is None:
        return
    assert response is not None
    assert response.headers["x-request-id"] == entry.record.id
    assert response.status_code == told_status(row, play.stream)
    if row.how == "engine" and row.outcome == "ok":
        usage = (
            events(play.body)[-2].get("usage") if play.stream else httpx.Response(200, text=play.body).json()["usage"]
        )
        assert entry.usage is not None
        assert usage is None or usage["completion_tokens"] == entry.usage.completion_tokens
    elif play.body and row.code != "*":
        error = events(play.body)[-1]["error"] if play.stream and response.status_code == 200 else None
        error = error or httpx.Response(200, text=play.body).json()["error"]
        assert error["code"] == row.code == entry.record.code


@pytest.mark.parametrize(("row", "kind", "stream"), CASES, ids=IDS)
async def test_each_way_to_end(root: Path, row: Row, kind: str, stream: bool) -> None:
    async with prepared(root, row, kind, stream) as play:
        await play()
        (entry,) = await play.entries()
        assert entry.record.outcome == row.outcome
        if row.how == "kill":
            billed_as(entry, play.expected)
            return
        assert entry.record.status == told_status(row, stream)
        if row.how == "unread":
            assert entry.usage is not None
            assert 0 < entry.usage.completion_tokens
            assert entry.usage.prompt_tokens == play.expected.prompt
        else:
            billed_as(entry, play.expected)
            was_told(play, entry)
        assert entry.usage is not None
        nothing_is_held(play, entry.usage.cost)


@pytest.mark.parametrize(("stream", "tokens"), [(True, 3), (False, 1)])
async def test_an_endpoint_that_tells_no_usage_is_billed_by_what_came(root: Path, stream: bool, tokens: int) -> None:
    row = next(row for row in ROWS if row.name == "finished, no usage told")
    async with prepared(root, row, "external", stream) as play:
        await play()
        (entry,) = await play.entries()
        billed_as(entry, Billed(completion=tokens))
        was_told(play, entry)
        assert entry.detail.engine["usage_reported"] is False


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", WIRES)
async def test_the_price_is_the_one_at_admission(root: Path, kind: str, stream: bool) -> None:
    row = next(row for row in ROWS if row.name == "client left after tokens")
    async with prepared(root, row, kind, stream) as play:
        asked = asyncio.create_task(play())
        await play._reached()
        routes = dict(play.stack.snapshots.snapshot.routes)
        dear = Price(version=8, currency="USD", input=10**9, cached_input=10**9, output=10**9)
        routes[MODEL] = msgspec.structs.replace(routes[MODEL], prices={"USD": dear})
        play.stack.snapshots.change(routes=routes)
        await asked
        (entry,) = await play.entries()
        billed_as(entry, play.expected)
        assert entry.usage is not None and entry.usage.price_version == PRICE.version


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", WIRES)
async def test_a_gateway_killed_after_the_last_byte_bills_all(
    root: Path, kind: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(row for row in ROWS if row.name == "finished")
    asked_to_settle, go_on = asyncio.Event(), asyncio.Event()

    async def pause(phase: str) -> None:
        if phase == "settle":
            asked_to_settle.set()
            await go_on.wait()

    async with prepared(root, row, kind, stream, fault_delays={"settle": 1.0}) as play:
        monkeypatch.setattr(play.pipeline, "pause", pause)
        asked = asyncio.create_task(play())
        await asyncio.wait_for(asked_to_settle.wait(), 10)
        play._copy_journal()
        go_on.set()
        await asked
        killed = play.stack.settings.journal_root.with_name("killed")
        ledger = Ledger()
        shipper = Shipper(killed, ledger)
        shipper.run_once()
        shipper.close()
        (entry,) = ledger.rows.values()
        assert entry.record.outcome == "gateway_lost"
        billed_as(entry, play.expected)


def table(heading: str) -> list[list[str]]:
    """Rows of the first table under a heading of docs/metering.md, without its head."""
    section = DOCS.read_text().split(f"## {heading}\n", 1)[1]
    lines = re.findall(r"^\|(.+)\|$", section.split("\n## ", 1)[0], re.MULTILINE)
    return [[cell.strip().strip("`") for cell in line.split("|")] for line in lines[2:]]


def test_the_documented_ways_to_end_are_these() -> None:
    told = {row[0]: row[1:] for row in table("Each way to end")}
    assert told == {row.name: [row.outcome, str(row.status or "–"), row.billed] for row in ROWS}


def test_the_documented_knowledge_of_engines_is_this() -> None:
    def words(bill: Billed) -> str:
        return f"{bill.prompt}, {bill.cached}, {bill.completion}"

    told = {row[0]: row[1:] for row in table("What is known before the end")}
    assert told == {kind: [words(SO_FAR[kind, True]), words(SO_FAR[kind, False])] for kind in WIRES}
