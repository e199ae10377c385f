"""The engine against vLLM on CPUs and llama.cpp: the same model, the same cores, through HTTP, one after the other.

    bench/rivals.sh                                   once: installs the rivals and converts the model
    python bench/engine.py [--only tokens@8] [--rounds 5] [--quick] [--json]

In every round each server gets the same load in turn while the others are stopped (SIGSTOP), so that what changes on the
machine meets all of them; figures are medians over the rounds. Bars are about those medians. A rival that is not
installed is reported as not run, and its bars are not met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.clients import quantile
from bench.engine_load import Ask, Reply, drive, words
from bench.engine_servers import Contender, Server, contenders, cpu_of, cpu_of_machine, prioritise

CORES = os.cpu_count() or 1
CLEAN = 0.05  # of the cores' time taken by others: a run above it is repeated
ATTEMPTS = 3
Metrics = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One load. `metric` is what its bars are about; `bars` is the least ratio, in our favour, to each rival."""

    name: str
    at_once: int
    prompt: int
    tokens: int
    metric: str
    bars: dict[str, float]

    @property
    def faster(self) -> int:
        """+1 where more is better, -1 where less is."""
        return 1 if self.metric == "tok_s" else -1

    def load(self, port: int, nonce: object) -> Metrics:
        """Put it on a server. Prompts are new for every nonce, so no prefix cache can help."""
        asks = [Ask(words((nonce, at), self.prompt), self.tokens) for at in range(self.at_once)]
        replies = drive(port, asks, self.at_once)
        wrong = {reply.counts["prompt_tokens"] for reply in replies} - {self.prompt}
        if wrong:
            raise SystemExit(f"{self.name}: prompts of {wrong} tokens instead of {self.prompt}")
        return summary(replies)


def summary(replies: list[Reply]) -> Metrics:
    """Tokens per second from the first request to the last token, prefill included; milliseconds for the rest."""
    seconds = max(reply.ended for reply in replies) - min(reply.sent for reply in replies)
    gaps = [gap for reply in replies for gap in reply.gaps]
    return {
        "tok_s": sum(reply.counts["completion_tokens"] for reply in replies) / seconds,
        "ttft_ms": statistics.median(reply.ttft for reply in replies) * 1000,
        "itl_p50_ms": quantile(gaps, 0.5) * 1000,
        "itl_p99_ms": quantile(gaps, 0.99) * 1000,
    }


CASES = [
    Case("tokens@1", 1, 96, 128, "tok_s", {"vllm": 4.0, "llama": 1.3}),
    Case("tokens@8", 8, 96, 128, "tok_s", {"vllm": 3.5}),
    Case("tokens@32", 32, 96, 128, "tok_s", {"vllm": 2.5, "llama": 4.0}),
    Case("prompt-2000", 1, 2000, 4, "ttft_ms", {"vllm": 1 / 0.8}),
]


@dataclass
class Sample:
    """One run of a case on one server."""

    case: str
    contender: str
    metrics: Metrics
    others: float  # share of the cores' time that neither the server nor this client took
    load_average: float


class Fleet:
    """The servers that are up, all of them asleep but the one in use."""

    def __init__(self, logs: Path, priority: int) -> None:
        self.logs, self.priority = logs, priority
        self.servers: dict[tuple[str, int], Server] = {}

    @contextlib.contextmanager
    def awake(self, contender: Contender, at_once: int) -> Iterator[Server]:
        """The contender's server, started if need be."""
        key = (contender.name, at_once if contender.per_concurrency else 0)
        if key not in self.servers:
            self.servers[key] = server = Server(contender, at_once, self.priority, self.logs / f"{contender.name}.log")
            began = time.monotonic()
            server.wait_ready()
            note(f"{contender.name} is up after {time.monotonic() - began:.1f} s")
        server = self.servers[key]
        server.resume()
        try:
            yield server
        finally:
            server.pause()

    def close(self, at_once: int | None = None) -> None:
        """End all servers, or those made for one concurrency."""
        for key in [key for key in self.servers if at_once is None or key[1] == at_once]:
            self.servers.pop(key).stop()


def note(text: str) -> None:
    """Progress goes to stderr; the result is alone on stdout."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def measured(server: Server, load: Callable[[], Metrics]) -> tuple[Metrics, float]:
    """The load's figures and the share of the cores that others took. Repeated when that was too much, the cleanest kept."""
    tries = []
    for _ in range(ATTEMPTS):
        wait_for_quiet(server)
        before, began = cpu_of_machine() - _own(server), time.monotonic()
        metrics = load()
        others = (cpu_of_machine() - _own(server) - before) / (time.monotonic() - began) / CORES
        tries.append((metrics, max(others, 0.0)))
        if others <= CLEAN:
            break
    return min(tries, key=lambda each: each[1])


def _own(server: Server) -> float:
    return server.cpu_seconds() + cpu_of(os.getpid())


def wait_for_quiet(server: Server, patience_s: float = 10.0) -> None:
    """Until others leave the cores alone for a moment, but not longer than the patience lasts."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before, began = cpu_of_machine() - _own(server), time.monotonic()
        time.sleep(0.3)
        if (cpu_of_machine() - _own(server) - before) / (time.monotonic() - began) / CORES <= CLEAN:
            return


def run_case(fleet: Fleet, case: Case, field: list[Contender], rounds: int) -> Iterator[Sample]:
    """Interleaved: every round measures each contender once, after one run that warms kernels and is not counted."""
    for number in range(-1, rounds):
        for contender in field:
            nonce = (time.time_ns(), case.name, number)
            with fleet.awake(contender, case.at_once) as server:
                if number < 0:
                    case.load(server.port, nonce)
                    continue
                metrics, others = measured(server, lambda: case.load(server.port, (nonce, time.time_ns())))  # noqa: B023
            yield Sample(case.name, contender.name, metrics, round(others, 3), os.getloadavg()[0])
    fleet.close(case.at_once)


def medians(samples: list[Sample], case: Case, name: str) -> Metrics:
    """Median of every metric over the rounds, and the best of the case's own."""
    runs = [sample for sample in samples if (sample.case, sample.contender) == (case.name, name)]
    if not runs:
        return {}
    figures = {metric: statistics.median(run.metrics[metric] for run in runs) for metric in runs[0].metrics}
    return figures | {
        "best": max((run.metrics[case.metric] for run in runs), key=lambda value: value * case.faster),
        "others": statistics.median(run.others for run in runs),
    }


def ratios(samples: list[Sample], case: Case, field: list[Contender]) -> list[dict[str, Any]]:
    """Ours against the best configuration of each rival, with the bar and the verdict."""
    known = contenders()
    rows = []
    for ours in (each for each in field if each.side == "ours"):
        mine = medians(samples, case, ours.name).get(case.metric)
        for side in ("vllm", "llama"):
            theirs = [
                (figures[case.metric], name)
                for name, each in known.items()
                if each.side == side and (figures := medians(samples, case, name))
            ]
            value, rival = max(theirs, key=lambda each: each[0] * case.faster) if theirs else (None, side)
            ratio = (mine / value) ** case.faster if mine and value else None
            rows.append(_verdict(case, ours, rival, ratio, case.bars.get(side)))
    return rows


def _verdict(case: Case, ours: Contender, rival: str, ratio: float | None, bar: float | None) -> dict[str, Any]:
    verdict = "NOT RUN" if ratio is None else "" if bar is None else "pass" if ratio >= bar else "FAIL"
    precision = contenders()[rival].precision
    return {
        "case": case.name, "metric": case.metric, "ours": ours.name, "our_precision": ours.precision, "rival": rival,
        "rival_precision": precision, "times_better": ratio and round(ratio, 2), "bar": bar, "verdict": verdict,
    }  # fmt: skip


def report(samples: list[Sample], cases: list[Case], field: list[Contender]) -> dict[str, Any]:
    """Everything that was measured, for --json and for the tables."""
    figures = [
        {"case": case.name, "contender": each.name, "precision": each.precision}
        | {name: round(value, 3) for name, value in medians(samples, case, each.name).items()}
        for case in cases
        for each in field
    ]
    compared = [row for case in cases for row in ratios(samples, case, field)]
    return {"figures": figures, "ratios": compared, "samples": [asdict(sample) for sample in samples]}


def show(result: dict[str, Any]) -> None:
    """The tables a person reads."""
    print(
        f"{'case':13} {'server':12} {'weights':7} {'tok/s':>8} {'TTFT ms':>9} {'ITL p50':>8} {'p99 ms':>8} {'best':>9} others"
    )
    for row in result["figures"]:
        if "tok_s" not in row:
            print(f"{row['case']:13} {row['contender']:12} NOT RUN")
            continue
        print(
            f"{row['case']:13} {row['contender']:12} {row['precision']:7} {row['tok_s']:8.1f} {row['ttft_ms']:9.1f}"
            f" {row['itl_p50_ms']:8.2f} {row['itl_p99_ms']:8.2f} {row['best']:9.1f} {row['others']:6.1%}"
        )
    print()
    for row in result["ratios"]:
        times = f"{row['times_better']:6.2f}×" if row["times_better"] else "      –"
        bar = f"bar {row['bar']:.2f}×" if row["bar"] else ""
        print(
            f"{row['case']:13} {row['metric']:8} {row['ours']} ({row['our_precision']}) against {row['rival']}"
            f" ({row['rival_precision']}): {times}  {bar:10} {row['verdict']}"
        )


def chosen(names: list[str]) -> list[Contender]:
    """The contenders asked for that are installed; says loudly which are not."""
    field = []
    for name in names:
        contender = contenders()[name]
        if contender.missing():
            note(f"NOT RUN: {name}. Missing {', '.join(map(str, contender.missing()))}; bench/rivals.sh installs it.")
        else:
            field.append(contender)
    return field


def main() -> None:
    """Measure and print; status 1 when a bar is not met or something was not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES], help="not all cases"
    )
    parser.add_argument("--servers", nargs="+", choices=list(contenders()), default=["ours-bf16", "vllm-all", "llama"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds: for a look, not for a claim")
    parser.add_argument(
        "--priority", type=int, default=0, help="nice value of servers and client, where others work too"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or case.name in options.only]
    field, samples = chosen(options.servers), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended then, too
    if options.priority:
        prioritise(os.getpid(), options.priority)
    with tempfile.TemporaryDirectory(prefix="fl-bench-") as logs:
        fleet = Fleet(Path(logs), options.priority)
        try:
            for case in cases:
                for sample in run_case(fleet, case, field, 2 if options.quick else options.rounds):
                    samples.append(sample)
                    note(
                        f"{case.name} {sample.contender}: {sample.metrics[case.metric]:.1f} {case.metric}, others {sample.others:.0%}"
                    )
        finally:
            fleet.close()
    result = report(samples, cases, field)
    print(json.dumps(result)) if options.json else show(result)
    sys.exit(any(row["verdict"] in ("FAIL", "NOT RUN") for row in result["ratios"]))


if __name__ == "__main__":
    main()
