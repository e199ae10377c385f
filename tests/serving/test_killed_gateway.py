"""A gateway process killed with clients in the middle of their streams: the shipper bills what they received."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from serving import journal
from serving.shipper import Shipper
from tests.serving.conftest import chat
from tests.serving.fakes import KEY, PROMPT_TOKENS, EngineCall, FakeEngine
from tests.serving.test_journal import Ledger

ROOT = Path(__file__).parents[2]
CLIENTS = 5
GATEWAY = """
import asyncio, sys
from pathlib import Path
import uvicorn
from serving import apikey
from serving.asgi import Gateway
from serving.port import GatewaySettings
from tests.serving.fakes import SECRET, FakeLive, FakeSnapshots, principal, replica, snapshot
import msgspec
root, key = Path(sys.argv[1]), sys.argv[2]
known = snapshot([replica(root / "engine.sock")])
known = msgspec.structs.replace(known, keys={apikey.digest(key, SECRET): principal()})
settings = GatewaySettings(
    journal_root=root / "journal", secret=SECRET, version="1", instance="victim", min_free_disk_bytes=0
)
gateway = Gateway(settings, FakeSnapshots(known), FakeLive())
uvicorn.run(gateway, uds=str(root / "gateway.sock"), interface="asgi3", log_level="error", lifespan="on")
"""


async def endless(call: EngineCall) -> None:
    await call.head()
    while not call.closed.is_set():
        await call.token("w ")
        await asyncio.sleep(0.001)


async def stream(root: Path) -> tuple[str, int]:
    """Read until the gateway is gone; the request's id and the tokens received."""
    reader, writer = await asyncio.open_unix_connection(str(root / "gateway.sock"))
    body = json.dumps(chat(stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    received = b""
    while data := await reader.read(65536):
        received += data
    writer.close()
    request_id = received.split(b"x-request-id: ")[1].split(b"\r\n")[0].decode()
    return request_id, received.count(b'"content": "w')


async def test_kill_9_under_load_bills_each_request_once_and_never_too_little(root: Path) -> None:
    engine = FakeEngine(root / "engine.sock")
    engine.script = endless
    await engine.start()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", GATEWAY, str(root), KEY, cwd=ROOT)
    async with asyncio.timeout(20):
        while not (root / "gateway.sock").is_socket():
            await asyncio.sleep(0.02)
        clients = [asyncio.create_task(stream(root)) for _ in range(CLIENTS)]
        while len(engine.calls) < CLIENTS or min(call.sent_tokens for call in engine.calls) < 20:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        received = dict(await asyncio.gather(*clients))
        await engine.stop()
    ledger = Ledger()
    shipper = Shipper(root / "journal", ledger)
    assert shipper.run_once() == CLIENTS
    shipper.close()
    assert set(ledger.rows) == set(received)
    for request_id, tokens in received.items():
        usage = ledger.rows[request_id].usage
        assert usage is not None
        assert usage.outcome == "gateway_lost"
        assert usage.prompt_tokens == PROMPT_TOKENS
        assert usage.completion_tokens >= tokens > 0
    assert journal.directories(root / "journal") == []
