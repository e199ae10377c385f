"""Measures the bars of first light on a stack of its own: `python bench/first_light.py [--json] [--only NAME …]`.

Every bar prints its figure, its limit and whether it holds; the exit status is 1 when one does not. Nothing here decides
a test: tests/ checks behaviour, this measures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import openai

from bench import clients, records
from bench.stack import MODEL, ROOT, Stack, StackError, eventually, now, running_stack
from serving.port import PHASES

WORDS = "river stone lamp window garden paper silver morning bridge winter summer village engine signal harbour letter".split()


@dataclass
class Bar:
    """One figure beside its limit."""

    name: str
    figure: str
    limit: str
    ok: bool
    details: dict[str, Any]


def prose(tokens: int, seed: int) -> str:
    """About `tokens` tokens of words, different for each seed from the first word on."""
    source = random.Random(seed)
    return f"Note {seed}. " + " ".join(source.choice(WORDS) for _ in range(int(tokens * 0.95)))


# -- the bars ------------------------------------------------------------------------------------------------------


def paris(stack: Stack) -> Bar:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key())
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 48,
    }
    whole = client.chat.completions.create(**ask).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)]
    same = whole == "".join(parts)
    return Bar(
        "paris",
        repr(whole),
        "Paris, identical streamed and not",
        same and "Paris" in (whole or ""),
        {},
    )


def coverage(stack: Stack) -> Bar:
    """Attributed share of wall time over requests of several kinds, and the two sides' token counts."""
    key = stack.key()

    async def ask() -> list[clients.Answer]:
        async with clients.session() as session:
            mixed = [(12, 40), (300, 24), (900, 8), (12, 1), (60, 120)]
            alone = [
                await clients.stream(session, stack.url, key, prose(size, seed), model=MODEL, max_tokens=out)
                for seed, (size, out) in enumerate(mixed)
            ]
            together = [
                clients.stream(session, stack.url, key, prose(size, 50 + seed), model=MODEL, max_tokens=out)
                for seed, (size, out) in enumerate(mixed * 2)
            ]
            return alone + list(await asyncio.gather(*together))

    answers = asyncio.run(ask())
    shares, agree = [], True
    for answer in answers:
        trace = stack.trace(answer.request_id)
        record, detail = trace["record"], trace["detail"]
        shares.append(1 - record["unattributed_us"] / record["duration_us"])
        agree &= answer.usage is not None and record["completion_tokens"] == answer.usage["completion_tokens"]
        agree &= detail["engine"]["cached_tokens"] + detail["engine"]["computed_tokens"] >= record["prompt_tokens"]
    ok = min(shares) >= 0.95 and agree
    details = {
        "median": round(statistics.median(shares), 4),
        "requests": len(shares),
        "tokens_agree": agree,
    }
    return Bar("coverage", f"{min(shares):.2%} at least", "≥ 95 %", ok, details)


def moved_phase(stack: Stack) -> Bar:
    """50 ms slept in one layer, on a stack of its own for each: that phase grows by as much, and no other does."""
    layers = (
        "auth",
        "admission",
        "routing",
        "connect",
        "tokenize",
        "engine_queue",
        "prefill",
        "decode",
        "deliver",
        "settle",
    )
    base = _phases(stack)
    wrong, moved = {}, {}
    for layer in layers:
        with running_stack(FAULT_DELAYS=f"{layer}=50") as delayed:
            now_ = _phases(delayed)
        grown = {name: now_[name] - base[name] for name in base}
        moved[layer] = round(grown[layer], 1)
        others = {name: round(value, 1) for name, value in grown.items() if name != layer and abs(value) > 20}
        if not 45 <= grown[layer] <= 75 or others:
            wrong[layer] = {"grown": moved[layer], "others": others}
    figure = ", ".join(f"{layer} +{value:.0f}" for layer, value in moved.items()) + " ms"
    return Bar("moved_phase", figure, "only the delayed phase grows, by 50 ms", not wrong, {"wrong": wrong})


def _phases(stack: Stack) -> dict[str, float]:
    """Median milliseconds of every phase over twenty short requests, one after the other."""
    key = stack.key()

    async def ask() -> list[clients.Answer]:
        async with clients.session() as session:
            await clients.stream(session, stack.url, key, "Warm up.", model=MODEL, max_tokens=2)
            return [
                await clients.stream(
                    session, stack.url, key, prose(30, seed), model=MODEL, max_tokens=2, ignore_eos=True
                )
                for seed in range(20)
            ]

    rows = []
    for answer in asyncio.run(ask()):
        phases = dict.fromkeys(PHASES, 0.0)
        for name, start, end, _args in stack.trace(answer.request_id)["detail"]["phases"]:
            phases[name] += (end - start) / 1000
        rows.append(phases)
    return {name: statistics.median(row[name] for row in rows) for name in PHASES}


def shared_prefix(stack: Stack) -> Bar:
    """The same 600-token prefix twice by one tenant, then by another. Medians of five different prefixes."""
    one = stack.key()
    with contextlib.suppress(StackError):
        stack.manage("tenant", "create", "other")
    other = stack.key("other")

    async def ask() -> list[dict[str, Any]]:
        rows = []
        async with clients.session() as session:
            for seed in range(5):
                # In the system message: the model's default one would be a shared prefix of every request.
                prompt = [
                    {"role": "system", "content": prose(600, 1000 + seed)},
                    {"role": "user", "content": "Go on."},
                ]
                answers = []
                for key in (one, one, other):
                    answers.append(
                        await clients.stream(
                            session,
                            stack.url,
                            key,
                            "",
                            messages=prompt,
                            model=MODEL,
                            max_tokens=4,
                            temperature=0,
                        )
                    )
                wrong = [answer for answer in answers if not answer.usage or not answer.stamps]
                if wrong:
                    raise RuntimeError(f"no answer: {wrong[0]}")
                cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]  # type: ignore[index]
                rows.append({"cached": cached, "ttft": [answer.ttft for answer in answers]})
        return rows

    rows = asyncio.run(ask())
    saved = statistics.median(1 - row["ttft"][1] / row["ttft"][0] for row in rows)
    right = all(row["cached"][0] == 0 and row["cached"][1] > 0 and row["cached"][2] == 0 for row in rows)
    details = {
        "cached": rows[0]["cached"],
        "ttft_ms": [round(each * 1000) for each in rows[0]["ttft"]],
    }
    return Bar(
        "shared_prefix",
        f"TTFT {saved:.0%} lower",
        "≥ 40 % lower; other tenant 0 cached",
        saved >= 0.4 and right,
        details,
    )


def concurrent_streams(stack: Stack) -> Bar:
    key = stack.key()
    since, before = now(), stack.engine()

    async def ask() -> list[clients.Answer]:
        async with clients.session() as session:
            return await asyncio.gather(
                *(
                    clients.stream(
                        session,
                        stack.url,
                        key,
                        prose(20 + 37 * (i % 8), 2000 + i),
                        model=MODEL,
                        max_tokens=16 + 9 * (i % 7),
                    )
                    for i in range(32)
                )
            )

    started = time.monotonic()
    answers = asyncio.run(ask())
    seconds = time.monotonic() - started
    complete = all(answer.done and answer.finish_reason in {"stop", "length"} for answer in answers)
    records = stack.settled(since, 32)
    stack.wait_idle()
    after = stack.engine()
    at_clients = sum(answer.usage["completion_tokens"] for answer in answers if answer.usage)
    in_ledger = sum(record["completion_tokens"] for record in records)
    in_engine = int(after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"])
    prompt = [
        sum(answer.usage["prompt_tokens"] for answer in answers if answer.usage),
        sum(record["prompt_tokens"] for record in records),
        int(after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"]),
    ]
    whole = after["fanlight:free_blocks"] == after["fanlight:total_blocks"]
    equal = at_clients == in_ledger == in_engine and len(set(prompt)) == 1
    details = {
        "prompt_tokens": prompt,
        "free_blocks_whole": whole,
        "tok_s": round(at_clients / seconds, 1),
    }
    figure = f"{at_clients} = {in_ledger} = {in_engine} tokens"
    return Bar(
        "concurrent_streams",
        figure,
        "32 complete, three sums equal, blocks whole",
        complete and equal and whole,
        details,
    )


def hang_ups(stack: Stack) -> Bar:
    """200 clients, half of them streaming, leave at random points."""
    key, source = stack.key(), random.Random(7)
    since = now()

    async def ask() -> list[clients.Answer]:
        async with clients.session() as session:
            return await asyncio.gather(
                *(
                    clients.stream(
                        session, stack.url, key, prose(30, 3000 + i),
                        hang_up_after=source.uniform(0.01, 8.0), model=MODEL, max_tokens=200,
                        stream=True,
                    )
                    for i in range(200)
                )
            )  # fmt: skip

    answers = asyncio.run(ask())
    idle = stack.wait_idle(60)
    records = {record["request_id"]: record for record in stack.settled(since, 200)}
    known = [answer for answer in answers if answer.request_id]
    short = [
        answer.request_id for answer in known if records[answer.request_id]["completion_tokens"] < len(answer.stamps)
    ]
    once = len(stack.usage(since)) == len(records) == 200
    figure = f"{len(records)} records, idle after {idle:.2f} s"
    ok = once and not short and idle <= 2 and all(answer.request_id in records for answer in known)
    details = {"billed_short": len(short), "got_headers": len(known)}
    return Bar("hang_ups", figure, "200 records, none short, idle ≤ 2 s, no block lost", ok, details)


def same_request_id(stack: Stack) -> Bar:
    key, since = stack.key(), now()

    async def ask() -> set[str]:
        async with clients.session() as session:
            answers = [
                await clients.stream(
                    session,
                    stack.url,
                    key,
                    "Hi",
                    headers={"x-request-id": "mine"},
                    model=MODEL,
                    max_tokens=2,
                )
                for _ in range(2)
            ]
            return {answer.request_id for answer in answers}

    ids = asyncio.run(ask())
    records = stack.settled(since, 2)
    ok = len(ids) == 2 and {record["request_id"] for record in records} == ids
    return Bar("same_request_id", f"{len(records)} records", "billed twice", ok, {})


async def _killing(
    stack: Stack, key: str, pid: int, prompts: list[str], *, max_tokens: int, after_s: float
) -> list[clients.Answer]:
    """Stream these at once, kill the process under them with signal 9, and say what each client saw."""
    async with clients.session() as session:
        asked = [
            clients.stream(session, stack.url, key, prompt, model=MODEL, max_tokens=max_tokens, ignore_eos=True)
            for prompt in prompts
        ]
        tasks = [asyncio.create_task(each) for each in asked]
        await asyncio.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*tasks)


def worker_killed(stack: Stack) -> Bar:
    key = stack.key()
    pid = stack.pid("worker")

    prompts = [prose(20, 4000 + i) for i in range(8)]
    answers = asyncio.run(_killing(stack, key, pid, prompts, max_tokens=400, after_s=2.0))
    killed = time.monotonic()

    async def again() -> clients.Answer:
        async with clients.session() as session:
            return await clients.stream(session, stack.url, key, "Hi", model=MODEL, max_tokens=2)

    eventually(lambda: asyncio.run(again()).done, 60, pause_s=0.2)
    seconds = time.monotonic() - killed
    told = all(answer.error or answer.done for answer in answers)
    transitions = stack.manage("transitions", "--json")
    reason = next((json.loads(line) for line in transitions.splitlines() if "SIGKILL" in line), None)
    ok = told and seconds <= 20 and reason is not None
    details = {"told": told, "reason": (reason or {}).get("reason")}
    return Bar(
        "worker_killed",
        f"serving again after {seconds:.1f} s",
        "≤ 20 s, clients told, reason shown",
        ok,
        details,
    )


def web_killed(stack: Stack) -> Bar:
    """kill -9 of the web process under load; every dispatched request is in the ledger once, none under-billed."""
    key, since = stack.key(), now()
    pid = stack.pid("web")

    prompts = [prose(25, 5000 + i) for i in range(24)]
    answers = asyncio.run(_killing(stack, key, pid, prompts, max_tokens=300, after_s=4.0))
    started = time.monotonic()
    eventually(lambda: stack.pid("web") not in {0, pid}, 30, Exception)
    known = [answer for answer in answers if answer.request_id]
    records = stack.settled(since, len(known))
    by_id = {record["request_id"]: record for record in records}
    missing = [answer.request_id for answer in known if answer.request_id not in by_id]
    short = [
        answer.request_id
        for answer in known
        if answer.request_id in by_id and by_id[answer.request_id]["completion_tokens"] < len(answer.stamps)
    ]
    eventually(lambda: asyncio.run(_healthy(stack)), 30, Exception)
    restart = time.monotonic() - started
    stack.wait_idle(30)
    ok = not missing and not short and len(by_id) == len(records)
    figure = f"{len(known)} dispatched, {len(missing)} missing, {len(short)} short, {len(records) - len(by_id)} twice"
    details = {
        "outcomes": {name: sum(r["outcome"] == name for r in records) for name in {r["outcome"] for r in records}},
        "received_chunks": sum(len(answer.stamps) for answer in known),
        "billed_tokens": sum(record["completion_tokens"] for record in records),
        "serving_again_s": round(restart, 1),
    }
    return Bar("web_killed", figure, "none missing, none twice, none short", ok, details)


async def _healthy(stack: Stack) -> bool:
    async with clients.session() as session, session.get(f"{stack.url}/healthz") as response:
        return response.status == 200


def database_away(stack: Stack) -> Bar:
    """TTFT and ITL with PostgreSQL there, then stopped (SIGSTOP, then ended and restarted by the supervisor)."""
    key = stack.key()
    since = now()
    asyncio.run(_steady(stack, key, 10, seed=1))
    base = asyncio.run(_steady(stack, key, 40, seed=6000))
    postgres = stack.pid("postgres")
    family = [postgres, *_children(postgres)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)  # every query hangs now, those of page sockets included
    try:
        hanging = asyncio.run(_steady(stack, key, 40, seed=7000))
    finally:
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    again = asyncio.run(_steady(stack, key, 40, seed=8000))
    records = stack.settled(since, 130, 60)
    answered = len(base) + len(hanging) + len(again)
    figures = {name: _latency(rows) for name, rows in (("base", base), ("hanging", hanging), ("back", again))}
    ratio_itl = figures["hanging"]["itl_p99_ms"] / max(figures["base"]["itl_p99_ms"], figures["back"]["itl_p99_ms"])
    ratio_ttft = figures["hanging"]["ttft_p99_ms"] / max(figures["base"]["ttft_p99_ms"], figures["back"]["ttft_p99_ms"])
    ok = len(records) == 130 and answered == 120 and ratio_itl <= 1.3 and ratio_ttft <= 1.3
    figure = f"p99 TTFT × {ratio_ttft:.2f}, p99 ITL × {ratio_itl:.2f}; {len(records)} of 130 in the ledger"
    return Bar("database_away", figure, "unchanged within noise; nothing lost", ok, figures)


def heavy_page(stack: Stack) -> Bar:
    """p99 ITL while the heaviest pages reload in a loop over a million records, against without, interleaved."""
    key = stack.key()
    cookie = sign_in(stack)
    records.seed(stack, 1_000_000)  # what makes these pages heavy
    quiet, loaded, pages = [], [], 0
    for round_ in range(3):
        quiet += asyncio.run(_steady(stack, key, 16, seed=9000 + 100 * round_))
        stop = asyncio.Event()

        async def both(stop: asyncio.Event = stop, round_: int = round_) -> tuple[list[clients.Answer], int]:
            reload = asyncio.create_task(_reload(stack, cookie, stop))
            rows = await _steady(stack, key, 16, seed=9050 + 100 * round_)
            stop.set()
            return rows, await reload

        rows, count = asyncio.run(both())
        loaded += rows
        pages += count
    figures = {"quiet": _latency(quiet), "loaded": _latency(loaded), "pages": pages}
    ratio = figures["loaded"]["itl_p99_ms"] / figures["quiet"]["itl_p99_ms"]
    return Bar(
        "heavy_page",
        f"p99 ITL × {ratio:.2f} with {pages} page loads",
        "≤ 1.3",
        ratio <= 1.3,
        figures,
    )


async def _reload(stack: Stack, cookie: dict[str, str], stop: asyncio.Event) -> int:
    count = 0
    async with clients.session() as session:
        while not stop.is_set():
            for page in ("/", "/requests/?range=24h"):
                async with session.get(stack.url + page, cookies=cookie, allow_redirects=False) as response:
                    await response.read()
                    if response.status != 200:
                        raise RuntimeError(f"{page} answered {response.status}")
                count += 1
    return count


async def _steady(stack: Stack, key: str, count: int, seed: int) -> list[clients.Answer]:
    """`count` requests, four at a time, all answered."""
    gate = asyncio.Semaphore(4)

    async def one(session: Any, index: int) -> clients.Answer:
        async with gate:
            return await clients.stream(
                session,
                stack.url,
                key,
                prose(30, seed + index),
                model=MODEL,
                max_tokens=32,
                ignore_eos=True,
            )

    async with clients.session() as session:
        answers = await asyncio.gather(*(one(session, index) for index in range(count)))
    return [answer for answer in answers if answer.done]


def _latency(answers: list[clients.Answer]) -> dict[str, float]:
    ttft = [answer.ttft * 1000 for answer in answers]
    gaps = [gap * 1000 for answer in answers for gap in answer.gaps]
    return {
        "ttft_p50_ms": round(clients.quantile(ttft, 0.5), 1),
        "ttft_p99_ms": round(clients.quantile(ttft, 0.99), 1),
        "itl_p50_ms": round(clients.quantile(gaps, 0.5), 1),
        "itl_p99_ms": round(clients.quantile(gaps, 0.99), 1),
    }


def restart(stack: Stack) -> Bar:
    """kill -9 of everything with a million request records, then `up` in the foreground until its banner."""
    rows = records.seed(stack, 1_000_000)
    stack.kill_everything()
    eventually(lambda: not stack.processes(), 10)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "manage.py"), "up"], cwd=ROOT, env=stack.env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Fanlight is up" in line:
            break
    banner = time.monotonic() - started
    stack.wait_ready(60)
    worker = time.monotonic() - started - banner
    os.set_blocking(process.stdout.fileno(), False)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=90)
    left = stack.processes()
    if not lines or "Fanlight is up" not in lines[-1]:
        return Bar("restart", "".join(lines[-5:]), "banner ≤ 15 s", False, {})
    ok = banner <= 15 and worker <= 10 and not left
    figure = f"banner after {banner:.1f} s, worker {worker:.1f} s later"
    return Bar("restart", figure, "≤ 15 s and ≤ 10 s", ok, {"records": rows, "left_after_ctrl_c": left})


def sign_in(stack: Stack) -> dict[str, str]:
    """Sign the first admin in (changing the first password where asked) and return the session cookie."""
    return asyncio.run(_sign_in(stack))


async def _sign_in(stack: Stack) -> dict[str, str]:
    password = "a-long-enough-Passphrase-9"
    with contextlib.suppress(StackError):  # made by an earlier bar
        stack.manage("user", "create", "bench", "--admin", "--keep", stdin=password)
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cookie_jar=jar) as session:
        async with session.get(f"{stack.url}/login/") as response:
            page = await response.text()
        token = page.split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]
        form = {"username": "bench", "password": password, "csrfmiddlewaretoken": token}
        async with session.post(f"{stack.url}/login/", data=form, headers={"referer": stack.url}) as response:
            if response.status != 200 or response.url.path == "/login/":
                raise RuntimeError(f"the sign-in was refused: {response.status} at {response.url.path}")
    return {cookie.key: cookie.value for cookie in jar}


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


BARS: tuple[Callable[[Stack], Bar], ...] = (
    paris, coverage, moved_phase, shared_prefix, concurrent_streams, hang_ups, same_request_id, worker_killed, web_killed,
    database_away, heavy_page, restart,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=[bar.__name__ for bar in BARS])
    options = parser.parse_args()
    results: list[Bar] = []
    with running_stack() as stack:
        for measure in BARS:
            if options.only and measure.__name__ not in options.only:
                continue
            try:
                bar = measure(stack)
            except Exception as error:  # noqa: BLE001 one bar that breaks must not hide the others
                bar = Bar(measure.__name__, f"{type(error).__name__}: {error}", "", False, {})
            results.append(bar)
            if not options.json:
                print(
                    f"{'ok ' if bar.ok else 'MISS'} {bar.name:<20} {bar.figure}   [{bar.limit}]  {bar.details}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"bars": [asdict(bar) for bar in results]}, indent=2, ensure_ascii=False))
    return 0 if all(bar.ok for bar in results) else 1


if __name__ == "__main__":
    sys.exit(main())
