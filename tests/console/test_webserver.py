"""A web process that is told to end: streams finish, newcomers hear why not, a second signal ends it now."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from serving.shipper import Shipper
from tests.serving.conftest import chat
from tests.serving.fakes import KEY, EngineCall, FakeEngine
from tests.serving.test_journal import Ledger

ROOT = Path(__file__).parents[2]
WEB = """
import sys
from pathlib import Path
import msgspec, uvicorn
from console.webserver import DrainingServer
from serving import apikey
from serving.asgi import Gateway
from serving.port import GatewaySettings
from tests.serving.fakes import SECRET, FakeLive, FakeSnapshots, principal, replica, snapshot
root, key, drain_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
known = snapshot([replica(root / "engine.sock")])
known = msgspec.structs.replace(known, keys={apikey.digest(key, SECRET): principal()})
settings = GatewaySettings(
    journal_root=root / "journal", secret=SECRET, version="1", instance="web", min_free_disk_bytes=0, drain_s=drain_s
)
gateway = Gateway(settings, FakeSnapshots(known), FakeLive())
config = uvicorn.Config(
    gateway, uds=str(root / "web.sock"), interface="asgi3", loop="uvloop", http="httptools", log_level="error",
    lifespan="on", timeout_graceful_shutdown=3,
)
DrainingServer(config, gateway.drain).run()
"""


class Web:
    """The process, an engine whose answers go on until told, and one client in the middle of a stream."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.go_on = asyncio.Event()
        self.engine = FakeEngine(root / "engine.sock")
        self.engine.script = self._talk
        self.process: asyncio.subprocess.Process
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(root / "web.sock")),
            base_url="http://web",
            headers={"authorization": f"Bearer {KEY}"},
            timeout=20,
        )

    async def _talk(self, call: EngineCall) -> None:
        await call.head()
        while not self.go_on.is_set() and not call.closed.is_set():
            await call.token("w ")
            await asyncio.sleep(0.01)
        await call.finish()

    async def start(self, drain_s: float) -> None:
        await self.engine.start()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WEB, str(self.root), KEY, str(drain_s), cwd=ROOT
        )
        while not (self.root / "web.sock").is_socket():
            await asyncio.sleep(0.02)

    async def ready(self) -> int:
        return (await self.client.get("/readyz")).status_code

    async def until_refusing(self) -> None:
        while await self.ready() != 503:
            await asyncio.sleep(0.01)

    async def stream(self) -> str:
        answer = await self.client.post("/v1/chat/completions", json=chat(stream=True))
        return answer.text

    async def started_stream(self) -> asyncio.Task[str]:
        task = asyncio.create_task(self.stream())
        while not self.engine.calls or self.engine.calls[-1].sent_tokens < 3:
            await asyncio.sleep(0.01)
        return task

    def outcomes(self) -> list[str]:
        ledger = Ledger()
        shipper = Shipper(self.root / "journal", ledger)
        shipper.run_once()
        shipper.close()
        return [str(row.record.outcome) for row in ledger.rows.values()]


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    root = Path(tempfile.mkdtemp(prefix="fl-web-"))
    made = Web(root)
    async with asyncio.timeout(30):
        yield made
        made.go_on.set()
        if made.process.returncode is None:
            made.process.kill()
        await made.process.wait()
        await made.client.aclose()
        await made.engine.stop()
    shutil.rmtree(root)


async def test_a_stream_finishes_and_newcomers_hear_why_not(web: Web) -> None:
    await web.start(drain_s=20)
    assert await web.ready() == 200
    running = await web.started_stream()
    web.process.send_signal(signal.SIGTERM)
    await web.until_refusing()
    refused = await web.client.post("/v1/chat/completions", json=chat())
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_shutting_down"
    assert refused.headers["retry-after"]
    assert (await web.client.get("/healthz")).status_code == 200
    assert not running.done()
    web.go_on.set()
    assert (await running).endswith("data: [DONE]\n\n")
    await web.process.wait()
    assert sorted(web.outcomes()) == ["ok", "rejected"]


async def test_a_stream_that_outlasts_the_drain_is_cut_with_an_error_event(web: Web) -> None:
    await web.start(drain_s=0.2)
    running = await web.started_stream()
    web.process.send_signal(signal.SIGTERM)
    last = (await running).strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
    await web.process.wait()
    assert web.outcomes() == ["error"]


async def test_a_second_signal_ends_at_once_and_what_was_cut_is_billed(web: Web) -> None:
    await web.start(drain_s=600)
    running = await web.started_stream()
    web.process.send_signal(signal.SIGTERM)
    await web.until_refusing()
    web.process.send_signal(signal.SIGTERM)
    await web.process.wait()
    with pytest.raises(httpx.HTTPError):
        await running
    assert web.outcomes() == ["gateway_lost"]
