"""The gateway's table of ways to end, on the real vLLM: each with one record, its tokens and money, nothing held."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from serving.metering import Billed
from tests.serving.outcomes import ROWS, Row, told_status
from tests.serving.test_outcomes import nothing_is_held, owed, was_told
from tests.vllm.gateway import ENDLESS, Play, Real, billed, in_front_of
from tests.vllm.server import PARAMETERS, Server

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 30}
TOO_LONG = {"messages": [{"role": "user", "content": "word " * 3000}]}

PLAYED: dict[str, Real] = {
    "finished": Real(),
    "finished by length": Real({"max_tokens": 3, "ignore_eos": True}),
    "finished with tool calls": Real(NAMED),
    "stop string": Real({"stop": ["a", "e"], **ENDLESS}),
    "client left before a token": Real(ENDLESS, crowd=PARAMETERS["max_num_seqs"]),
    "client left after tokens": Real(ENDLESS),
    "no first token in time": Real(ENDLESS, crowd=PARAMETERS["max_num_seqs"]),
    "stall after tokens": Real(ENDLESS, freeze_after=True),
    "gateway stopped": Real(ENDLESS),
    "bad input": Real(),
    "no access": Real(),
    "no replica": Real(),
    "limit": Real(),
    "queue full": Real(slots=1),
    "queue timeout": Real(slots=1),
    "engine refused": Real(TOO_LONG),
    "engine had no room": Real(crowd=PARAMETERS["max_num_queued_reqs"]),
    "gateway killed": Real(ENDLESS),
}
AT_THE_END = {  # they end the engine: test_ends.py
    "engine died before a byte was sent",
    "engine failed before a byte was sent",
    "engine died after a byte was sent",
    "engine failed after a byte was sent",
}
NOT_PLAYED = {
    "finished after reasoning": "this model does not think",
    "client does not read": "on a CPU it writes no faster than anybody reads",
}
CASES = [(row, stream) for row in ROWS if row.name in PLAYED for stream in row.streams]
IDS = [f"{row.name}-{'stream' if stream else 'whole'}".replace(" ", "_") for row, stream in CASES]


def test_every_row_that_a_vllm_can_play_is_played() -> None:
    theirs = {row.name for row in ROWS if "vllm" in row.engines}
    assert theirs == {*PLAYED, *AT_THE_END, *NOT_PLAYED}


@pytest.mark.parametrize(("row", "stream"), CASES, ids=IDS)
async def test_each_way_to_end(vllm: Server, root: Path, row: Row, stream: bool) -> None:
    real, before = PLAYED[row.name], await asyncio.to_thread(vllm.rest)
    settings = {"drain_s": 0.0} if row.how == "stop" else {}
    async with in_front_of(vllm, root, real.slots, route_changes=row.route, **settings) as stack:
        play = Play(stack, vllm, row, real, stream)
        await play()
        entry = await play.entry()
        assert entry.record.outcome == row.outcome
        paid = billed(entry)
        if row.how != "kill":
            assert entry.record.status == told_status(row, stream)
            if row.name != "engine refused":
                was_told(play, entry)  # type: ignore[arg-type]
        after = await asyncio.to_thread(vllm.rest)  # beside the loop: the gateway has connections to close in it
        _is_right(play, paid, after["generation_tokens"] - before["generation_tokens"])
        assert entry.usage is not None and entry.usage.cost == owed(paid)
        if row.how != "kill" and row.prepare != "occupied":
            nothing_is_held(play, entry.usage.cost)  # type: ignore[arg-type]


def _is_right(play: Play, paid: Billed, generated: int) -> None:
    """What was billed against what the client was told, what the gateway saw, and what the engine itself counted."""
    rule = play.row.billed
    if rule == "nothing":
        assert paid == Billed()
    elif rule == "all":
        details = play.told["prompt_tokens_details"] or {}
        told = (play.told["prompt_tokens"], details.get("cached_tokens") or 0, play.told["completion_tokens"])
        assert (paid.prompt, paid.cached, paid.completion) == told
        assert paid.completion == generated
        if play.row.name == "finished by length":
            assert paid.completion == 3
    else:
        # Whatever is still under way when the gateway hangs up is the engine's loss.
        assert max(play.seen, 1) <= paid.completion <= generated
        assert paid.prompt > 30 and paid.cached == 0
        with contextlib.suppress(AttributeError):
            assert play.prompt in (0, paid.prompt)
