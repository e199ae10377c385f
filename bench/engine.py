"""The engine against vLLM on CPUs and llama.cpp: the same model, the same cores, through HTTP, one after the other.

    bench/rivals.sh                                   once: installs the rivals and converts the model
    python bench/engine.py [--only tokens@8] [--rounds 5] [--quick] [--json]

In every round each server gets the same load in turn while the others are stopped (SIGSTOP), so that what changes on
the machine meets all of them; figures are medians over the rounds. Bars are about those medians. A rival that is not
installed is reported as not run, and its bars are not met. A full run takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.engine_alone import ALONE
from bench.engine_calm import Calm, prioritise
from bench.engine_cases import CASES, Case, Metrics
from bench.engine_load import LoadError
from bench.engine_report import Findings, Sample, failed, markdown, report, show
from bench.engine_servers import Contender, Server, contenders

DEFAULT = ["ours", "ours-int8", "ours-bf16", "vllm-all", "llama"]


class Fleet:
    """The servers that are up, all of them asleep but the one in use."""

    def __init__(self, logs: Path, priority: int, found: Findings) -> None:
        self.logs, self.priority, self.found = logs, priority, found
        self.servers: dict[tuple[str, int], Server] = {}

    @contextlib.contextmanager
    def awake(self, contender: Contender, at_once: int) -> Iterator[Server]:
        """The contender's server, started if need be."""
        key = (contender.name, at_once if contender.per_concurrency else 0)
        if key not in self.servers:
            self.servers[key] = server = Server(contender, at_once, self.priority, self.logs / f"{contender.name}.log")
            began = time.monotonic()
            server.wait_ready()
            self.found.starts[contender.name] = time.monotonic() - began
            self.found.precisions[contender.name] = server.precision
            note(f"{contender.name} ({server.precision}) is up after {time.monotonic() - began:.1f} s")
            if "passed_over" in server.facts():
                note(f"{contender.name} passed over a faster path: {server.facts()['passed_over'][:300]}")
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


def run_case(fleet: Fleet, calm: Calm, case: Case, rounds: int) -> Iterator[Sample]:
    """Interleaved: every round measures each contender once, after one run that warms kernels and is not counted."""
    field = [contenders()[name] for name in case.servers] or list(fleet.found.entrants)
    for number in range(-1, rounds):
        for contender in list(field):
            try:
                with fleet.awake(contender, case.at_once) as server:
                    if number < 0:
                        case.load(server.port, time.time_ns(), warm_up=True)
                        continue
                    metrics, others = calm.measured(partial(put, case, server.port), server)
            except (LoadError, OSError, RuntimeError) as error:  # the others go on; without any sample it is NOT RUN
                note(f"{case.name} {contender.name} FAILED and is left out: {error}")
                field.remove(contender)
                continue
            yield Sample(case.name, contender.name, metrics, round(others, 3), os.getloadavg()[0])
    fleet.close(case.at_once)


def put(case: Case, port: int) -> Metrics:
    """The case's load with prompts that were never used before."""
    return case.load(port, time.time_ns())


def run_all(found: Findings, options: argparse.Namespace, logs: Path) -> None:
    """What needs the machine for itself first, then the cases with all servers up."""
    rounds, calm = 2 if options.quick else options.rounds, Calm(options.patience)
    for name, alone in ALONE.items():
        if not options.only or name in options.only:
            note(name)
            found.checks += alone(logs, rounds, calm)
    fleet = Fleet(logs, options.priority, found)
    try:
        for case in found.cases:
            for sample in run_case(fleet, calm, case, rounds):
                found.samples.append(sample)
                value = f"{sample.metrics[case.metric]:.1f} {case.metric}"
                note(f"{case.name} {sample.contender}: {value}, others {sample.others:.0%}")
    finally:
        fleet.close()


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


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = [*ALONE, *(case.name for case in CASES)]
    known = [name for name, each in contenders().items() if each.side != "own"]
    add("--only", nargs="+", metavar="CASE", choices=names, help=f"some of {', '.join(names)}")
    add("--servers", nargs="+", metavar="SERVER", choices=known, default=DEFAULT, help=f"some of {', '.join(known)}")
    add("--rounds", type=int, default=5, help="measurements of each server in each case (default: 5)")
    add("--quick", action="store_true", help="two rounds: for a look, not for a claim")
    add("--patience", type=float, default=120, metavar="S", help="wait so long in all for others to pause (120)")
    add("--priority", type=int, default=0, help="nice value of servers and client; only for short runs")
    add("--json", action="store_true", help="one JSON object, every sample in it")
    add("--markdown", type=Path, metavar="FILE", help="also write the tables of docs/engine.md there")
    return parser.parse_args()


def main() -> None:
    """Measure and print; status 1 when a bar is not met or something was not run."""
    options, began = arguments(), time.monotonic()
    cases = [case for case in CASES if not options.only or case.name in options.only]
    found = Findings(cases, chosen(options.servers))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended then, too
    if options.priority:
        prioritise(os.getpid(), options.priority)
    with tempfile.TemporaryDirectory(prefix="fl-bench-") as logs:
        try:
            run_all(found, options, Path(logs))
        except (KeyboardInterrupt, SystemExit):
            note("ended early; this is what was measured so far")
            found.complete = False
    found.seconds = time.monotonic() - began
    result = report(found)
    if options.markdown:
        options.markdown.write_text(markdown(found) + "\n", "utf-8")
    if options.json:
        print(json.dumps(result))
    else:
        show(result, cases)
    sys.exit(failed(result) or not found.complete)


if __name__ == "__main__":
    main()
