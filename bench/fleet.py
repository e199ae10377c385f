"""What happens to requests when workers fail, and when the fleet changes: `python bench/fleet.py [--json] [--only NAME …]`.

Two embedded replicas behind one route, under steady load. One after the other: a worker is killed, one is killed as the
kernel's out-of-memory killer does it (with all that it started, from outside), one is stopped (SIGSTOP), one has its
step thread deadlocked by the engine's test hook, and one has its socket stolen by a listener that hangs up. One has a
prompt whose prefill takes over a minute, in chunks: it is slow, and stays. Then the deployment is scaled to one and
back, and its configuration is rolled out three times: with room to surge, with the controller killed in the middle of
it, on a card that holds two replicas and no more (`full`), and on one that holds the only replica there is (`alone`).
At last a replica lends the second one what it does not use of a card that cannot hold both, and needs it back (`lent`).

The bars: no request that had no byte fails; a stopped worker is out of rotation within 10 s, a deadlocked one within
R24's N (10 s here) and a heartbeat; both are replaced within 30 s; scaling fails nothing; a rollout answers each request
with 200, or with 503 after the route's full queue time, and on a full card it serves with one replica less for no
longer than a cold start and 5 s; a lender keeps to what its loan leaves it, its borrower goes when it needs more, and
then it may use its whole pool again.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.stack import MODEL, Stack, eventually

CLIENTS = 4
TOKENS = 24
QUEUE_S = 10.0
OUT_OF_ROTATION_S = 10.0
REPLACED_S = 30.0
HEARTBEAT_S = 2.0  # between a worker's own verdict and the row: probe, tick and write
SLACK_S = 5.0  # of a machine that others use too
DIP_S = 5.0
LONG_PROMPT = 7_800  # tokens: 28 chunks
KV_TOKEN = 2 * 30 * 3 * 64 * 2  # bytes of KV of a token of the bundled model
CHUNK_MS = 2_300  # that each further chunk of a prompt takes: 27 of them are over a minute
FULL_CARD = "sim:1xFULL-5G"  # holds two replicas of the bundled model
SMALL_CARD = "sim:1xFULL-3G"  # and this one
LENDING_CARD = "sim:1xLEND-4G"
LONG = 5_200  # tokens of a prompt: two of them are nearly all that the lender has left
LONG_CHUNK_MS = 400  # its chunks are so slow that somebody looks meanwhile, and requests beside it are not


@dataclass
class Asked:
    """One request: when it began (unix), how it ended, and after how long."""

    at: float
    status: int = 0
    bytes: int = 0
    done: bool = False
    error: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.done

    @property
    def lost_without_a_byte(self) -> bool:
        """Nothing was sent to its client, and it failed: it should have been tried elsewhere."""
        return not self.ok and not self.bytes

    @property
    def waited_in_vain(self) -> bool:
        return self.status == 503 and self.seconds >= QUEUE_S - 0.5


@dataclass
class Load:
    """Clients that ask one after the other until told to stop."""

    port: int
    key: str
    asked: list[Asked] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(CLIENTS):
            thread = threading.Thread(target=self._ask_on, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> list[Asked]:
        """Let those that run end, and return all."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=120)
        return sorted(self.asked, key=lambda each: each.at)

    def _ask_on(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            self.asked.append(ask(self.port, self.key, f"client {number}, question {count}: tell me something."))


def ask(port: int, key: str, question: str, tokens: int = TOKENS, timeout_s: float = 90) -> Asked:
    """Ask once, streaming, and read to the end."""
    asked = Asked(time.time())
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": tokens,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        asked.status = response.status
        text = b""
        while piece := response.read1(65536):
            text += piece
            asked.bytes += len(piece) if response.status == 200 else 0
        asked.done = b"data: [DONE]" in text
        asked.error = "" if asked.done else text.decode(errors="replace")[-300:]
    except (OSError, http.client.HTTPException) as error:
        asked.error = repr(error)
    finally:
        connection.close()
    asked.seconds = time.time() - asked.at
    return asked


# -- the site ---------------------------------------------------------------------------------------------------------


class Site:
    """A stack with replicas of the bundled model, seen through its commands."""

    def __init__(self, stack: Stack, count: int = 2) -> None:
        self.stack = stack
        self.count = count
        self._struck = 0
        self.key = stack.key(name=f"fleet-{time.time_ns()}")

    def manage(self, *argv: str) -> str:
        return self.stack.manage("deployment", *argv)

    def replicas(self) -> list[dict[str, Any]]:
        return list(self.stack.status()["replicas"])

    def ready(self) -> list[dict[str, Any]]:
        return [each for each in self.replicas() if each["state"] == "ready"]

    def victim(self) -> dict[str, Any]:
        """Each in turn: who fails again and again is restarted later and later."""
        self._struck += 1
        return self.ready()[self._struck % 2]

    def wait(self, count: int = 0, timeout_s: float = 90) -> None:
        """Until exactly so many (all of them) are ready, and no other has a worker."""
        count = count or self.count

        def so() -> bool:
            states = [each["state"] for each in self.replicas()]
            return states.count("ready") == count and set(states) <= {"ready", "stopped"}

        eventually(so, timeout_s, pause_s=0.3)

    def transitions(self, since: float, subject: str = "") -> list[dict[str, Any]]:
        """Changes of state since a moment, oldest first, with `when` in unix seconds."""
        rows = [json.loads(line) for line in self.stack.manage("transitions", "--json", "--limit", "300").splitlines()]
        for row in rows:
            row["when"] = datetime.fromisoformat(row["at"]).timestamp()
        return [row for row in reversed(rows) if row["when"] >= since and subject in row["subject"]]

    @contextlib.contextmanager
    def load(self) -> Iterator[Load]:
        made = Load(self.stack.port, self.key)
        made.start()
        try:
            yield made
        finally:
            made.stop()

    def uds(self, replica: dict[str, Any]) -> Path:
        """The newest socket of a replica's worker."""
        found = sorted(self.stack.data.rglob(f"{replica['id'].replace('-', '')[:10]}-*.sock"))
        return found[-1]


@dataclass
class Figures:
    """What one scenario came to. `ok`: nobody lost what they should not have. `late`: a bar in seconds was missed,
    which says as much of the machine as of the product where others use it too."""

    name: str
    ok: bool
    facts: dict[str, Any]
    late: bool = False

    def line(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        return f"{'FAIL' if not self.ok else 'late' if self.late else 'ok  '}  {self.name:12} {facts}"


def _counts(asked: list[Asked]) -> dict[str, Any]:
    return {
        "requests": len(asked),
        "cut": sum(not each.ok and each.bytes > 0 for each in asked),
        "lost_without_a_byte": sum(each.lost_without_a_byte for each in asked),
    }


# -- workers that fail ------------------------------------------------------------------------------------------------


def killed(site: Site) -> Figures:
    """kill -9 of a worker."""
    return _fails(site, "killed", lambda replica: os.kill(replica["pid"], signal.SIGKILL), REPLACED_S)


def oom(site: Site) -> Figures:
    """As the kernel's out-of-memory killer ends it: SIGKILL from outside, to all that shares the memory."""

    def strike(replica: dict[str, Any]) -> None:
        mark = f"WORKER_OF_REPLICA={replica['id']}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)

    return _fails(site, "oom", strike, REPLACED_S)


def stopped(site: Site) -> Figures:
    """SIGSTOP: it answers no probe, and its connections stay open."""
    return _fails(site, "stopped", lambda replica: os.kill(replica["pid"], signal.SIGSTOP), OUT_OF_ROTATION_S)


def deadlocked(site: Site) -> Figures:
    """Its step thread waits for good: probes are answered, sequences run, no step is made."""
    limit = OUT_OF_ROTATION_S + HEARTBEAT_S
    return _fails(site, "deadlocked", lambda replica: os.kill(replica["pid"], signal.SIGUSR2), limit)


def robbed(site: Site) -> Figures:
    """Somebody else listens where its socket was, takes connections, and hangs up."""
    thief = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def strike(replica: dict[str, Any]) -> None:
        path = site.uds(replica)
        path.unlink()
        thief.bind(str(path))
        thief.listen()
        threading.Thread(target=_hang_up, args=(thief,), daemon=True).start()

    try:
        return _fails(site, "robbed", strike, OUT_OF_ROTATION_S)
    finally:
        thief.close()


def _hang_up(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def _fails(site: Site, name: str, strike: Callable[[dict[str, Any]], None], out_within_s: float) -> Figures:
    """Under load, one of two workers fails; the site serves on, and it is replaced."""
    site.wait(2)
    victim = site.victim()
    with site.load() as load:
        time.sleep(3)
        struck_at = time.time()
        strike(victim)
        rows = eventually(lambda: _replacement(site, victim, struck_at), out_within_s + REPLACED_S + 30, pause_s=0.5)
        time.sleep(2)
        asked = load.stop()
    out, back = rows
    served = [each for each in asked if each.ok and struck_at < each.at + each.seconds < back["when"]]
    facts = {
        "out_s": round(out["when"] - struck_at, 2),
        "replaced_s": round(back["when"] - struck_at, 2),
        "reason": out["reason"][:90],
        "served_meanwhile": len(served),
        **_counts(asked),
    }
    ok = facts["out_s"] <= out_within_s + SLACK_S and facts["lost_without_a_byte"] == 0 and bool(served)
    late = facts["out_s"] > out_within_s or facts["replaced_s"] > REPLACED_S
    return Figures(name, ok, facts, late)


def _replacement(site: Site, victim: dict[str, Any], since: float) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """When the victim left rotation, and when it was ready again."""
    rows = site.transitions(since, victim["name"])
    out = next((row for row in rows if row["old"] == "ready"), None)
    back = next((row for row in rows if row["new"] == "ready"), None)
    return (out, back) if out and back else None


def slow(site: Site) -> Figures:
    """A prefill of over a minute, made of chunks, keeps stepping: nobody is restarted, and its client is answered."""
    site.wait(2)
    site.stack.manage("route", "set", MODEL, "--first-token-deadline-s", "600")
    began = time.time()
    asked = ask(site.stack.port, site.key, "hello " * LONG_PROMPT, tokens=4, timeout_s=600)
    changes = [f"{row['subject']} {row['new']}" for row in site.transitions(began)]
    facts = {"seconds": round(asked.seconds, 1), "status": asked.status, "changes": changes, "error": asked.error}
    return Figures("slow", asked.ok and asked.seconds > 60 and not changes, facts)


# -- a fleet that changes ---------------------------------------------------------------------------------------------


def scaled(site: Site) -> Figures:
    """To one replica and back to two, under load."""
    site.wait(2)
    with site.load() as load:
        time.sleep(2)
        site.manage("scale", MODEL, "1")
        site.wait(1)
        time.sleep(2)
        site.manage("scale", MODEL, "2")
        site.wait(2)
        time.sleep(2)
        asked = load.stop()
    failed = [each for each in asked if not each.ok]
    return Figures("scaled", not failed, {**_counts(asked), "failed": len(failed), **_first_error(failed)})


def surge(site: Site) -> Figures:
    """A change of configuration where there is room for one more."""
    return _rollout(site, "surge")


def leaderless(site: Site) -> Figures:
    """kill -9 of the controller while a replica of the new revision starts."""

    def strike() -> None:
        eventually(lambda: any(each["state"] in ("starting", "loading") for each in site.replicas()), 60, pause_s=0.2)
        os.kill(site.stack.pid("controller"), signal.SIGKILL)

    found = _rollout(site, "leaderless", meanwhile=strike)
    expected = {each["pid"] for each in site.ready()}
    workers = {
        pid for pid in site.stack.processes() if b"engine\0serve" in _cmdline(pid) and b"shim" not in _cmdline(pid)
    }
    orphans = workers - expected
    facts = {**found.facts, "workers": len(workers), "orphans": len(orphans)}
    return Figures(found.name, found.ok and not orphans, facts, found.late)


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def full(site: Site) -> Figures:
    """The same on a card that holds two replicas and no more."""
    return _rollout(site, "full", dips_allowed=True)


def alone(site: Site) -> Figures:
    """The same on a card that holds the only replica: it goes, and the next one comes, while requests wait."""
    return _rollout(site, "alone", dips_allowed=True)


def lent(site: Site) -> Figures:
    """A second replica lives on what the first lends it, until that one's own requests need it back."""
    blocks = _lend(site)
    (lender,) = site.ready()
    with site.load() as load:
        site.manage("scale", MODEL, "2")
        site.wait(2)
        limited = eventually(lambda: _told_otherwise(site.uds(lender), blocks), 30, pause_s=0.2)
        since = time.time()
        prompts = _ask_the_worker(site.uds(lender), 2)
        drained = eventually(lambda: _gave_back(site, since), 60, pause_s=0.3)
        eventually(lambda: not _told_otherwise(site.uds(lender), blocks), 90, pause_s=0.2)
        whole = time.time()
        for prompt in prompts:
            prompt.join(120)
        site.manage("scale", MODEL, "1")
        site.wait(1)
        asked = load.stop()
    failed = [each for each in asked if not each.ok]
    facts = {
        "pool": blocks, "left_by_the_loan": limited, "drained_after_s": round(drained["when"] - since, 1),
        "whole_again_after_s": round(whole - drained["when"], 1), "reason": drained["reason"],
        "long_prompts": [prompt.status for prompt in prompts], "failed": len(failed), **_counts(asked),
        **_first_error(failed),
    }  # fmt: skip
    ok = limited < blocks and not failed and all(prompt.status == 200 for prompt in prompts)
    return Figures("lent", ok, facts)


def _lend(site: Site) -> int:
    """Have the only replica lend, with a pool that leaves a second one no more than the lender needs at rest."""
    site.wait(1)
    began, (card, resident) = time.time(), _card(site)
    besides = sum(size for part, size in resident["planned"].items() if part != "kv")
    window, block = 8192 * KV_TOKEN, 16 * KV_TOKEN
    left = int(max(besides + window, besides / 0.7) * 1.02)
    blocks = (card["total_bytes"] - card["unattributed_bytes"] - left - besides) // block
    site.manage(
        "set", MODEL, "--lends", "yes", "--autoscale", "yes", "--max-replicas", "2", "--planned-concurrency", "4",
        "--planned-tokens", "1024", "--parameter", f"num_blocks={blocks}", "--parameter", "max_num_seqs=16",
    )  # fmt: skip
    eventually(lambda: _ended(site, began), 120, pause_s=0.5)
    site.wait(1)
    return int(blocks)


def _card(site: Site) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only card, and who lives there."""
    card = json.loads(site.stack.manage("cards", "list", "--json").splitlines()[0])
    return card, next(each for each in card["residents"] if each["state"] == "reserved")


def _pool(uds: Path) -> dict[str, Any]:
    """What a worker says of itself."""
    with _worker(uds, 10) as worker:
        return dict(worker.get("/stats").json())


def _worker(uds: Path, timeout_s: float) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://worker", timeout=timeout_s)


def _told_otherwise(uds: Path, blocks: int) -> int:
    """The blocks that a worker may use, if they are not all of its pool."""
    usable = int(_pool(uds)["usable_blocks"])
    return 0 if usable == blocks else usable


def _gave_back(site: Site, since: float) -> dict[str, Any] | None:
    wanted = "has to give back its loan"
    return next((row for row in site.transitions(since) if wanted in row["reason"]), None)


class LongPrompt(threading.Thread):
    """A prompt straight to one worker, which holds blocks for all of it for as long as it is read."""

    def __init__(self, uds: Path, number: int) -> None:
        super().__init__(daemon=True)
        self.status = 0
        self._uds, self._number = uds, number

    def run(self) -> None:
        body = {"model": _pool(self._uds)["model"], "prompt": [100 + self._number] * LONG, "max_tokens": 4}
        with contextlib.suppress(httpx.HTTPError), _worker(self._uds, 300) as worker:
            self.status = worker.post("/v1/completions", json=body).status_code


def _ask_the_worker(uds: Path, count: int) -> list[LongPrompt]:
    prompts = [LongPrompt(uds, number) for number in range(count)]
    for prompt in prompts:
        prompt.start()
    return prompts


def _rollout(site: Site, name: str, dips_allowed: bool = False, meanwhile: Callable[[], None] | None = None) -> Figures:
    site.wait()
    began = time.time()
    sizes = {"surge": "48", "full": "40", "leaderless": "56", "alone": "40"}
    with site.load() as load:
        time.sleep(2)
        site.manage("set", MODEL, "--parameter", f"max_num_seqs={sizes[name]}")
        if meanwhile is not None:
            meanwhile()
        done = eventually(lambda: _ended(site, began), 240, pause_s=0.5)
        time.sleep(2)
        asked = load.stop()
    site.wait()
    rows = site.transitions(began)
    starts = _cold_starts(rows)
    dips = _dips(rows, site.count)
    failed = [each for each in asked if not (each.ok or each.waited_in_vain)]
    facts = {
        "ended": done["new"],
        "seconds": round(done["when"] - began, 1),
        "cold_start_s": round(max(starts), 2),
        "longest_dip_s": round(max(dips, default=0.0), 2),
        "503_after_the_full_wait": sum(each.waited_in_vain for each in asked),
        "failed": len(failed),
        **_counts(asked),
        **_first_error(failed),
    }
    late = max(dips, default=0.0) > max(starts) + DIP_S
    return Figures(name, done["new"] == "done" and not failed and (dips_allowed or not dips), facts, late)


def _ended(site: Site, since: float) -> dict[str, Any] | None:
    ends = {"done", "rolled_back", "failed", "superseded"}
    return next((row for row in site.transitions(since) if row["new"] in ends and "→" in row["subject"]), None)


def _cold_starts(rows: list[dict[str, Any]]) -> list[float]:
    """Seconds from each launch until the replica was ready."""
    began: dict[str, float] = {}
    found = []
    for row in rows:
        if row["new"] == "starting":
            began[row["subject"]] = row["when"]
        elif row["new"] == "ready" and row["subject"] in began:
            found.append(row["when"] - began.pop(row["subject"]))
    return found


def _dips(rows: list[dict[str, Any]], count: int) -> list[float]:
    """Seconds for which fewer than `count` were ready, each time."""
    ready, since, found = count, 0.0, []
    for row in rows:
        if row["old"] == "ready" and row["new"] != "ready":
            ready -= 1
            since = row["when"] if ready == count - 1 else since
        elif row["new"] == "ready":
            ready += 1
            if ready == count:
                found.append(row["when"] - since)
    return found


def _first_error(failed: list[Asked]) -> dict[str, Any]:
    return {"first": f"{failed[0].status} {failed[0].error[:200]}"} if failed else {}


FAILURES = (killed, oom, stopped, deadlocked, robbed, slow)
CHANGES = (scaled, surge, leaderless)
ON_CARDS: tuple[tuple[Callable[[Site], Figures], int, dict[str, str]], ...] = (
    (full, 2, {"DEVICES": FULL_CARD}),
    (alone, 1, {"DEVICES": SMALL_CARD}),
    (lent, 1, {"DEVICES": LENDING_CARD, "FAULT_DELAYS": f"chunk={LONG_CHUNK_MS}"}),
)


@contextlib.contextmanager
def site_of(count: int, native: Path | None = None, **settings: str) -> Iterator[Site]:
    """A stack whose deployment has so many ready replicas; `native` holds what another one has compiled."""
    stack = Stack(**{"FAULT_DELAYS": f"deadlock=0,chunk={CHUNK_MS}", **settings})
    if native is not None and native.exists():
        (stack.data / "native").symlink_to(native)
    try:
        stack.up()
        stack.wait_ready(240)
        site = Site(stack, count)
        site.manage("scale", MODEL, str(count))
        site.wait(count, 240)
        yield site
    finally:
        stack.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    names = [each.__name__ for each in (*FAILURES, *CHANGES, full, alone, lent)]
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=names, default=names)
    options = parser.parse_args()
    found: list[Figures] = []
    chosen = [each for each in (*FAILURES, *CHANGES) if each.__name__ in options.only]
    if chosen:
        with site_of(2) as site:
            for scenario in chosen:
                found.append(scenario(site))
                print(found[-1].line(), file=sys.stderr)
    for scenario, count, settings in ON_CARDS:
        if scenario.__name__ in options.only:
            with site_of(count, **settings) as site:
                found.append(scenario(site))
                print(found[-1].line(), file=sys.stderr)
    if options.json:
        print(json.dumps({each.name: {"ok": each.ok and not each.late, **each.facts} for each in found}))
    return 0 if all(each.ok and not each.late for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
