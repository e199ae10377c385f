"""The autoscaler over two days of traffic: `python bench/autoscaler.py [--json]`.

bench/data/tide.csv has requests and their mean lengths by the minute, with two bursts. fleet.autoscaler decides once a
minute, as in the product; replicas are simulated, so two days take seconds and every run gives the same figures.

The service model: a replica runs SLOTS requests at once and shares RATES (tokens a second at a concurrency, vLLM 0.32 on
two CPU cores) evenly among them. A request's work is its output and PREFILL of each prompt token that is not cached.
It is ready COLD_START_S after its start. Lengths are exponential around the minute's mean, arrivals even at random
within the minute (seeded). Nobody is refused after 10 s here, unlike in the gateway: waits are counted as they would be.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import os
import random
import sys
import tempfile
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if "FANLIGHT_DATA_DIR" not in os.environ:  # settings keep a secret where they are told to
    _DATA = tempfile.TemporaryDirectory()
    os.environ["FANLIGHT_DATA_DIR"] = _DATA.name
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

import django

django.setup()

from console.fleet.autoscaler import Fleet, Policy, Sample, Verdict, decide

TIDE = ROOT / "bench" / "data" / "tide.csv"
RATES = ((1, 24.0), (8, 157.0), (16, 247.0), (32, 373.0))
SLOTS = 32
PREFILL = 1 / 8  # of the work of a generated token at full batch
COLD_START_S = 110.0
BURST_SHARE = 1.5  # a minute is of a burst when it has this many times the median of the hour around it
WAIT_BAR_S = 10.0
HOURS_BAR = 0.60
STEADY = 0.85  # upper end of R18's steady target, of the most that a replica can do
POLICY = Policy(least=1, most=12)


@dataclass(frozen=True)
class Minute:
    """One line of the tide."""

    requests: int
    prompt: float
    output: float
    shared: float


@dataclass
class Server:
    """One simulated replica. Its clock is virtual: tokens that each of its requests has got since it started."""

    ready_at: float
    clock: float = 0.0
    ends: list[float] = field(default_factory=list)  # heap, on its clock
    draining: bool = False
    filled: float = 0.0  # seconds × share of its slots, since the last look


@dataclass
class Outcome:
    """What a run came to. `waits` are (minute of arrival, seconds in the queue)."""

    replica_s: float = 0.0
    waits: list[tuple[int, float]] = field(default_factory=list)
    verdicts: list[tuple[float, int, Verdict]] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)  # wanted, by the minute
    busy: list[float | None] = field(default_factory=list)


def read_tide() -> list[Minute]:
    """The traffic by the minute."""
    with TIDE.open() as file:
        return [
            Minute(
                int(row["requests"]), float(row["mean_prompt_tokens"]), float(row["mean_output_tokens"]),
                float(row["shared_prefix_share"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def rate(running: int) -> float:
    """Tokens a second of a replica that runs so many requests, between the measured points."""
    at = bisect_right([point for point, _ in RATES], running)
    if at == len(RATES):
        return RATES[-1][1]
    (low, slow), (high, quick) = RATES[at - 1], RATES[at]
    return slow + (quick - slow) * (running - low) / (high - low)


_RATE = [0.0, *(rate(running) for running in range(1, SLOTS + 1))]


def bursts(tide: list[Minute]) -> list[range]:
    """Runs of minutes far above the median of the hour around them."""
    found: list[range] = []
    for at, minute in enumerate(tide):
        around = sorted(each.requests for each in tide[max(0, at - 30) : at + 31])
        if minute.requests > BURST_SHARE * around[len(around) // 2]:
            if found and at <= found[-1].stop + 1:
                found[-1] = range(found[-1].start, at + 1)
            else:
                found.append(range(at, at + 1))
    return [each for each in found if len(each) >= 3]


def simulate(tide: list[Minute], policy: Policy | None = None, fixed: int = 0) -> Outcome:
    """Two days under a policy, or with a fixed number of replicas."""
    chance = random.Random(7)
    servers = [Server(ready_at=0.0) for _ in range(fixed or 1)]
    desired, changed_at = len(servers), None
    samples: deque[Sample] = deque(maxlen=120)
    queue: deque[tuple[float, int, float]] = deque()  # arrival, minute, work
    outcome = Outcome()
    for number, minute in enumerate(tide):
        arrivals = sorted(_arrivals(chance, number, minute))
        at = 0
        for second in range(number * 60, number * 60 + 60):
            while at < len(arrivals) and arrivals[at][0] < second + 1:
                queue.append(arrivals[at])
                at += 1
            for server in servers:
                _advance(server, second, queue, outcome)
            _admit(servers, second + 1.0, queue, outcome)
        outcome.replica_s += 60.0 * len(servers)
        now = (number + 1) * 60.0
        servers = [server for server in servers if not server.draining or server.ends]
        ready = [server for server in servers if server.ready_at <= now and not server.draining]
        busy = sum(server.filled for server in ready) / (60.0 * len(ready)) if ready else None
        for server in servers:
            server.filled = 0.0
        samples.append(Sample(now, busy, minute.requests / 60.0))
        outcome.busy.append(busy)
        if policy is not None:
            loading = sum(server.ready_at > now for server in servers)
            verdict = decide(policy, now, samples, Fleet(desired, len(ready), loading, changed_at=changed_at))
            if verdict.after != desired:
                outcome.verdicts.append((now, desired, verdict))
                _scale(servers, verdict.after - desired, now)
                desired, changed_at = verdict.after, now
        outcome.replicas.append(desired)
    return outcome


def _arrivals(chance: random.Random, number: int, minute: Minute) -> list[tuple[float, int, float]]:
    mean = minute.output + PREFILL * minute.prompt * (1 - minute.shared)
    return [
        (number * 60 + 60 * chance.random(), number, max(1.0, chance.expovariate(1 / mean)))
        for _ in range(minute.requests)
    ]


def _advance(server: Server, second: float, queue: deque[tuple[float, int, float]], outcome: Outcome) -> None:
    """One second of a replica: whoever ends makes room for the head of the queue."""
    now, left = float(second), 1.0
    if server.ready_at > now:
        return
    while left > 0 and server.ends:
        running = len(server.ends)
        pace = _RATE[running] / running
        until_end = (server.ends[0] - server.clock) / pace
        step = min(left, until_end)
        server.filled += step * running / SLOTS
        left -= step
        now += step
        server.clock += step * pace
        if until_end <= step:
            heapq.heappop(server.ends)
            if queue and queue[0][0] <= now and not server.draining:
                _take(server, now, queue, outcome)


def _admit(servers: list[Server], now: float, queue: deque[tuple[float, int, float]], outcome: Outcome) -> None:
    """Hand out the queue, each to the replica that runs the fewest."""
    open_ = [server for server in servers if server.ready_at <= now and not server.draining]
    while queue and open_:
        server = min(open_, key=lambda each: len(each.ends))
        if len(server.ends) >= SLOTS:
            return
        _take(server, now, queue, outcome)


def _take(server: Server, now: float, queue: deque[tuple[float, int, float]], outcome: Outcome) -> None:
    arrived, minute, work = queue.popleft()
    outcome.waits.append((minute, max(0.0, now - arrived)))
    heapq.heappush(server.ends, server.clock + work)


def _scale(servers: list[Server], by: int, now: float) -> None:
    """More start cold; of fewer, those that run the least are drained."""
    if by > 0:
        servers += [Server(ready_at=now + COLD_START_S) for _ in range(by)]
        return
    for server in sorted((each for each in servers if not each.draining), key=lambda each: len(each.ends))[:-by]:
        server.draining = True


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def static_peak(tide: list[Minute], outside: list[Minute]) -> int:
    """Replicas that keep the busiest minute outside of the bursts at STEADY of what they can do."""
    peak = max(
        minute.requests * (minute.output + PREFILL * minute.prompt * (1 - minute.shared)) / 60 for minute in outside
    )
    return int(-(-peak // (STEADY * RATES[-1][1])))


def measure() -> dict[str, Any]:
    """The figures, and whether the bars hold."""
    tide = read_tide()
    found = bursts(tide)
    outcome = simulate(tide, POLICY)
    after = [range(each.start, each.stop + _recovery(outcome, each)) for each in found]
    within = {minute for each in after for minute in each}
    outside = [minute for at, minute in enumerate(tide) if at not in within]
    static = static_peak(tide, outside)
    fixed = simulate(tide, fixed=static)
    share = outcome.replica_s / fixed.replica_s
    waits = [wait for minute, wait in outcome.waits if minute not in within]
    p99 = quantile(waits, 0.99)
    return {
        "replica_hours": round(outcome.replica_s / 3600, 1),
        "static_replicas": static,
        "static_replica_hours": round(fixed.replica_s / 3600, 1),
        "share": round(share, 3),
        "queue_wait_p99_s": round(p99, 2),
        "queue_wait_over_10_s": sum(wait > WAIT_BAR_S for wait in waits),
        "requests": len(outcome.waits),
        "changes": len(outcome.verdicts),
        "most_replicas": max(outcome.replicas),
        "bursts": [_cost(tide, outcome, fixed, burst, window) for burst, window in zip(found, after, strict=True)],
        "ok": share <= HOURS_BAR and p99 < WAIT_BAR_S,
    }


def least_static() -> int:
    """The smallest fixed number of replicas that keeps the bar on waits outside of the bursts: hindsight, not a plan."""
    tide = read_tide()
    within = {minute for each in bursts(tide) for minute in range(each.start, each.stop + 30)}
    fixed = static_peak(tide, [minute for at, minute in enumerate(tide) if at not in within])
    while fixed > 1:
        waits = [wait for minute, wait in simulate(tide, fixed=fixed - 1).waits if minute not in within]
        if quantile(waits, 0.99) >= WAIT_BAR_S:
            break
        fixed -= 1
    return fixed


def _recovery(outcome: Outcome, burst: range) -> int:
    """Minutes after a burst until its queue is gone: until whoever comes waits less than a second at the median."""
    for minute in range(burst.stop, burst.stop + 60):
        waits = [wait for at, wait in outcome.waits if at == minute]
        if quantile(waits, 0.5) < 1.0:
            return minute - burst.stop
    return 60


def _cost(tide: list[Minute], outcome: Outcome, fixed: Outcome, burst: range, window: range) -> dict[str, Any]:
    """What a burst came to: who waited over 10 s would have got a 503."""

    def over(run: Outcome) -> int:
        return sum(wait > WAIT_BAR_S for minute, wait in run.waits if minute in window)

    waits = [wait for minute, wait in outcome.waits if minute in window]
    return {
        "minutes": [burst.start, burst.stop - 1],
        "recovered_after_min": len(window) - len(burst),
        "requests": sum(tide[minute].requests for minute in window),
        "wait_p50_s": round(quantile(waits, 0.5), 1),
        "wait_max_s": round(max(waits), 1),
        "over_10_s": over(outcome),
        "over_10_s_static": over(fixed),
        "replicas": [outcome.replicas[burst.start], max(outcome.replicas[minute] for minute in window)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    result = measure()
    least = least_static()
    result |= {"least_static_replicas": least, "share_of_least": round(result["replica_hours"] / (48 * least), 3)}
    if options.json:
        print(json.dumps(result))
        return 0 if result["ok"] else 1
    for name, value in result.items():
        print(f"{name:22} {value}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
