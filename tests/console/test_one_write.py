"""What is written in one turn of the loop leaves together, in order, and before a close."""

from __future__ import annotations

import asyncio
from typing import Any

from console.one_write import OneWrite


class Recorded:
    def __init__(self) -> None:
        self.did: list[Any] = []

    def write(self, data: bytes) -> None:
        self.did.append(data)

    def close(self) -> None:
        self.did.append("close")

    def abort(self) -> None:
        self.did.append("abort")

    def get_write_buffer_size(self) -> int:
        return 5

    def is_closing(self) -> bool:
        return False


def transport() -> tuple[OneWrite, Recorded]:
    recorded = Recorded()
    return OneWrite(recorded, asyncio.get_running_loop()), recorded  # type: ignore[arg-type]


async def test_writes_of_one_turn_are_one() -> None:
    one, recorded = transport()
    one.write(b"head ")
    one.write(b"body")
    assert recorded.did == [] and one.get_write_buffer_size() == 14
    await asyncio.sleep(0)
    assert recorded.did == [b"head body"]
    one.write(b"next")
    await asyncio.sleep(0)
    assert recorded.did == [b"head body", b"next"]


async def test_a_close_comes_after_what_was_written_and_an_abort_instead_of_it() -> None:
    one, recorded = transport()
    one.write(b"last")
    one.close()
    await asyncio.sleep(0)
    assert recorded.did == [b"last", "close"]
    one, recorded = transport()
    one.write(b"never")
    one.abort()
    await asyncio.sleep(0)
    assert recorded.did == ["abort"]
    assert one.is_closing() is False  # all else is the transport's own
