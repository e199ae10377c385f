"""Every way a request can end, as docs/metering.md tells it: the table that test_outcomes.py plays through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from serving.metering import Billed
from tests.serving.fakes import CACHED_TOKENS, PROMPT_TOKENS
from tests.serving.wires import ExternalWire, Wire

PIECES = 3
TOKENS = 6
WHOLE_BILL = Billed(PROMPT_TOKENS, CACHED_TOKENS, TOKENS)
SO_FAR = {
    # (engine, whether it streams to the gateway): known of three pieces before the end
    ("embedded", True): Billed(PROMPT_TOKENS, CACHED_TOKENS, TOKENS),
    ("embedded", False): Billed(PROMPT_TOKENS, CACHED_TOKENS, TOKENS),
    ("vllm", True): Billed(PROMPT_TOKENS, 0, TOKENS),
    ("vllm", False): Billed(PROMPT_TOKENS, 0, TOKENS),
    ("external", True): Billed(0, 0, PIECES),
    ("external", False): Billed(),
}

Script = Callable[[Wire], Awaitable[None]]


async def speaks(wire: Wire) -> None:
    await wire.begin()
    for word in ("Paris", " is", " it"):
        await wire.say(word)


async def finishes(wire: Wire) -> None:
    await speaks(wire)
    await wire.end()


async def runs_out(wire: Wire) -> None:
    await speaks(wire)
    await wire.end("length")


async def calls_a_tool(wire: Wire) -> None:
    await wire.begin()
    for number, arguments in enumerate(("", '{"a"', ":1}")):
        told = {"index": 0, "function": {"arguments": arguments}}
        if number == 0:
            told |= {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}
        await wire.piece({"tool_calls": [told]})
    await wire.end("tool_calls")


async def thinks(wire: Wire) -> None:
    await wire.begin()
    await wire.think("hm")
    await wire.say("Paris")
    await wire.say(" it is")
    await wire.end()


async def tells_no_usage(wire: Wire) -> None:
    assert isinstance(wire, ExternalWire)
    wire.tells_usage = False
    await finishes(wire)


async def goes_on(wire: Wire) -> None:
    """Three pieces, then nothing until the gateway hangs up."""
    await speaks(wire)
    await wire.call.until_closed()


async def hangs(wire: Wire) -> None:
    await wire.call.until_closed()


async def floods(wire: Wire) -> None:
    await wire.begin()
    while not wire.call.closed.is_set():
        await wire.say("w" * 8000)


async def dies(wire: Wire) -> None:
    wire.call.die()


async def fails_after_text(wire: Wire) -> None:
    await speaks(wire)
    await wire.report_error()


async def fails(wire: Wire) -> None:
    await wire.refuse(500)


async def refuses(wire: Wire) -> None:
    await wire.refuse(400)


async def has_no_room(wire: Wire) -> None:
    await wire.refuse(503)


async def is_not_asked(wire: Wire) -> None:
    raise AssertionError("a refused request reached the engine")


@dataclass(frozen=True)
class Row:
    """One way to end. `how` says who ends it; `billed` is a rule of docs/metering.md."""

    name: str
    outcome: str
    status: int
    billed: str  # "all", "so far" or "nothing"
    script: Script
    code: str = ""
    how: str = "engine"  # "die", "client", "deadline", "stop", "kill", "unread"
    streams: tuple[bool, ...] = (True, False)
    engines: tuple[str, ...] = ("embedded", "vllm", "external")
    body: dict[str, Any] = field(default_factory=dict)
    route: dict[str, Any] = field(default_factory=dict)
    prepare: str = ""  # what stands in its way: "state", "limit", "occupied", "access"
    reasoning: int = 0


STREAMED = (True,)
FULL = {"max_queued": 0}
IMPATIENT = {"queue_timeout_s": 0.05}
TOOL = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

ROWS = (
    Row("finished", "ok", 200, "all", finishes),
    Row("finished by length", "ok", 200, "all", runs_out),
    Row("finished with tool calls", "ok", 200, "all", calls_a_tool, body={"tools": TOOL}),
    Row("finished after reasoning", "ok", 200, "all", thinks, reasoning=2),
    Row("finished, no usage told", "ok", 200, "so far", tells_no_usage, engines=("external",), streams=STREAMED),
    Row("stop string", "ok", 200, "so far", goes_on, body={"stop": [" it"]}),
    Row("client left before a token", "cancelled", 499, "nothing", hangs, "client_closed_request", "client"),
    Row("client left after tokens", "cancelled", 499, "so far", goes_on, "client_closed_request", "client"),
    Row("no first token in time", "timeout", 504, "nothing", hangs, "deadline_exceeded", "deadline"),
    Row("stall after tokens", "timeout", 504, "so far", goes_on, "deadline_exceeded", "deadline"),
    Row("client does not read", "slow_reader", 500, "so far", floods, "slow_reader", "unread", STREAMED),
    Row("engine died before a byte was sent", "error", 502, "nothing", dies, "engine_unreachable"),
    Row("engine failed before a byte was sent", "error", 502, "nothing", fails, "engine_error"),
    Row("engine died after a byte was sent", "error", 502, "so far", goes_on, "engine_unreachable", "die", STREAMED),
    Row(
        "engine failed after a byte was sent",
        "error",
        502,
        "so far",
        fails_after_text,
        "engine_error",
        "engine",
        STREAMED,
    ),
    Row("gateway stopped", "error", 503, "so far", goes_on, "server_shutting_down", "stop", STREAMED),
    Row("bad input", "rejected", 400, "nothing", is_not_asked, "unknown_parameter", body={"nonsense": 1}),
    Row("no access", "rejected", 404, "nothing", is_not_asked, "model_not_found", prepare="access"),
    Row("no replica", "rejected", 503, "nothing", is_not_asked, "no_ready_replica", prepare="state"),
    Row("limit", "rejected", 429, "nothing", is_not_asked, "rate_limit_exceeded", prepare="limit"),
    Row("queue full", "rejected", 503, "nothing", hangs, "queue_full", prepare="occupied", route=FULL),
    Row(
        "queue timeout",
        "rejected",
        503,
        "nothing",
        hangs,
        "queue_timeout",
        prepare="occupied",
        route=IMPATIENT,
    ),
    Row("engine refused", "rejected", 400, "nothing", refuses, "*"),
    Row("engine had no room", "rejected", 503, "nothing", has_no_room, "engine_overloaded"),
    Row("gateway killed", "gateway_lost", 0, "so far", goes_on, "", "kill"),
)


def expected(row: Row, engine: str, stream: bool) -> Billed:
    """What the rule comes to, in tokens."""
    if row.billed == "nothing":
        return Billed()
    if row.billed == "all":
        return Billed(PROMPT_TOKENS, CACHED_TOKENS, TOKENS, row.reasoning)
    return SO_FAR[engine, stream or "stop" in row.body]


def told_status(row: Row, stream: bool) -> int:
    """What the client and the record have: an answer that has begun keeps its 200."""
    return 200 if stream and row.billed == "so far" and row.status else row.status


CASES = [(row, engine, stream) for row in ROWS for engine in row.engines for stream in row.streams]
IDS = [f"{row.name}-{engine}-{'stream' if stream else 'whole'}".replace(" ", "_") for row, engine, stream in CASES]
