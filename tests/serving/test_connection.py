"""A connection that came back belongs to whoever has it next."""

from __future__ import annotations

import asyncio
from pathlib import Path

from serving.replicas import Channel
from serving.upstream import EngineCall
from tests.serving.fakes import replica

EVENTS = b"data: [DONE]\n\n"
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENTS), EVENTS)
)


async def test_a_request_that_is_done_lets_go_of_a_connection_only_once(tmp_path: Path) -> None:
    asked, over = asyncio.Queue[asyncio.StreamWriter](), asyncio.Event()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            await asked.put(writer)
        writer.close()
        over.set()

    engine_replica = replica(tmp_path / "engine.sock")
    server = await asyncio.start_unix_server(engine, engine_replica.uds)
    channel = Channel(engine_replica)
    async with asyncio.timeout(10):
        connection = await channel.connection()
        first = EngineCall(connection, lambda _payloads: True, asyncio.get_running_loop())
        first.send(b"first\n")
        (await asked.get()).write(ANSWER)
        await first.done
        assert await channel.connection() is connection  # it came back in the read that completed the first
        second = EngineCall(connection, lambda _payloads: True, asyncio.get_running_loop())
        second.send(b"second\n")
        channel.leave_to_end(connection, first)
        first.abort()
        (await asked.get()).write(ANSWER)
        await second.done
        channel.close()
        await over.wait()
    server.close()
    await server.wait_closed()
