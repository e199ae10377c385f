"""The gateway against LiteLLM's proxy and vllm-router on one core each, in one run: `python bench/gateway.py`.

nginx with one fixed answer, and a compiled source of paced streams, are the upstreams; wrk and compiled clients are the
load. Whoever is measured has core 0 for its gateway; all else, Fanlight's Valkey, shipper and PostgreSQL included, shares
core 1. Rounds are interleaved, figures are medians, delays have a direct run subtracted. Exit code 1: a bar was missed or
not run. bench/peers.sh installs the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import gateway_native as load
from bench.engine_calm import Calm
from bench.gateway_fanlight import Fanlight
from bench.gateway_native import LoadError
from bench.gateway_peers import INSTANT_TOKENS, INTERVAL_US, MODELS, Contender, LiteLLM, Router, Upstreams
from bench.gateway_processes import Meter, cpu_s
from bench.gateway_report import Findings, Sample, failed, report, show
from bench.stack import StackError

SECTIONS = ("latency", "throughput", "two", "paced", "most", "instant")
CONNECTIONS = 64
STREAMS = 256
MOST = 8192
ADDED_MS = 5.0


class Bench:
    """The contenders, and what is found out about them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rounds = 1 if options.quick else options.rounds
        self.seconds = 3 if options.quick else 8
        self.tokens = 120 if options.quick else 300
        self.sections = options.only or list(SECTIONS)
        self.found = Findings()
        self.contenders: list[Contender] = []
        self._calm = Calm(60.0 if options.quick else 300.0)
        self._ours: list[int] = []  # pids of everything measured and of what it stands on

    @contextlib.contextmanager
    def started(self, peers: list[str]) -> Iterator[None]:
        """Everybody who can be started; who cannot is said so in the report."""
        with tempfile.TemporaryDirectory(prefix="fl-gateway-bench-") as name:
            folder = Path(name)
            folder.chmod(0o755)  # nginx's worker is another user
            self._folder = folder
            upstreams = Upstreams(folder, self.tokens)
            self.contenders = [upstreams]
            makers: dict[str, Callable[[], Contender]] = {
                "LiteLLM": lambda: LiteLLM(folder, upstreams),
                "vllm-router": lambda: Router(folder, upstreams),
                "Fanlight": lambda: Fanlight(upstreams),
            }
            try:
                for peer in peers:
                    self._start(peer, makers[peer])
                yield
            finally:
                for each in reversed(self.contenders):
                    each.stop()

    def cpu_seconds(self) -> float:
        """CPU time of all contenders and of the loads that have ended, for `Calm`: what is not a disturbance."""
        return cpu_s(self._ours) + sum(os.times()[2:4])

    def run(self) -> None:
        began = time.monotonic()
        self._ours = list(
            {
                pid
                for each in self.contenders
                for model in MODELS
                for pids in each.groups(model).values()
                for pid in pids
            }
        )
        for number in range(self.rounds):
            for section in self.sections:
                for contender in self.contenders:
                    with self._alone(contender):
                        self._measure(section, contender, number)
        self.found.seconds = time.monotonic() - began

    def _start(self, name: str, make: Callable[[], Contender]) -> None:
        say(f"starting {name}")
        try:
            contender = make()
        except (OSError, RuntimeError, StackError) as error:
            self.found.not_run[name] = str(error)[-1500:]
            return
        self.contenders.append(contender)
        self.found.configurations[name] = contender.configuration()

    @contextlib.contextmanager
    def _alone(self, contender: Contender) -> Iterator[None]:
        for each in self.contenders:
            if each is not contender:
                each.pause()
        try:
            contender.resume()
            yield
        finally:
            for each in self.contenders:
                each.resume()

    def _measure(self, section: str, contender: Contender, number: int) -> None:
        """Run a section; one that others disturbed is repeated, and the share of the cores they took is kept."""
        say(f"round {number + 1}: {section}, {contender.name}")

        def run() -> list[Sample]:
            before = len(self.found.samples)
            getattr(self, f"_{section}")(contender)
            made = self.found.samples[before:]
            del self.found.samples[before:]
            return made

        try:
            samples, others = self._calm.measured(run, self)
        except LoadError as error:
            self.found.not_run[f"{section}, {contender.name}"] = str(error)
            return
        for each in samples:
            each.figures["others"] = others
        self.found.samples += samples

    # ---- the sections

    def _latency(self, contender: Contender) -> None:
        count = 200 if contender.name == "LiteLLM" else 2000
        figures = load.latency(contender.port("whole"), "whole", contender.key, count)
        self.found.add("latency", contender.name, figures)

    def _throughput(self, contender: Contender) -> None:
        with Meter(contender.groups("whole")) as meter:
            figures = load.throughput(contender.port("whole"), "whole", contender.key, CONNECTIONS, self.seconds)
        if figures["refused"] or figures["broken"]:
            raise LoadError(f"{figures['refused']} requests refused, {figures['broken']} broken")
        self.found.add("throughput", contender.name, figures, meter, figures["requests"])

    def _two(self, contender: Contender) -> None:
        """The same load on one gateway process and on two."""
        if not isinstance(contender, Fanlight):
            return
        with contender.two_processes(self._folder) as (port, pids):
            sides = {"one process": (contender.port("whole"), contender.groups("whole")["gateway"])}
            sides["two processes"] = port, pids
            for name, (at, gateway) in sides.items():
                with Meter({"gateway": gateway}) as meter:
                    figures = load.throughput(at, "whole", contender.key, CONNECTIONS, self.seconds)
                if figures["refused"] or figures["broken"]:
                    raise LoadError(f"{name}: {figures['refused']} requests refused, {figures['broken']} broken")
                self.found.add("two", name, figures, meter, figures["requests"])

    def _paced(self, contender: Contender) -> None:
        if contender.name == "LiteLLM":
            return  # 7,680 events a second are twenty times what it passes on
        self._streams("paced", contender, STREAMS)

    def _instant(self, contender: Contender) -> None:
        with Meter(contender.groups("instant")) as meter:
            figures = load.answers(
                contender.port("instant"), "instant", contender.key, 16, INSTANT_TOKENS, self.seconds
            )
        self._check(figures)
        self.found.add("instant", contender.name, figures, meter, figures["answers"])

    def _most(self, contender: Contender) -> None:
        """The largest number of streams that still arrive in time, to an eighth."""
        if contender.name == "direct":
            return
        good, bad, held = 0, MOST, {}
        count = 16 if contender.name == "LiteLLM" else STREAMS
        while count > good and bad / max(good, 1) > 1.125:
            figures = self._try(contender, count)
            if figures is not None:
                good, held = count, figures
            else:
                bad = count
            count = min(good * 2, MOST) if bad == MOST and good else round((max(good, 1) * bad) ** 0.5)
        self.found.add("most", contender.name, {"streams": good, **held})

    def _try(self, contender: Contender, count: int) -> dict[str, Any] | None:
        """Figures of so many streams if they hold the bar."""
        direct = self._streams("paced direct", self.contenders[0], count)
        figures = self._streams("paced tries", contender, count)
        added = figures["p99_ms"] - direct["p99_ms"]
        trusted = "" if not direct["late"] else "; the load itself is late at so many"
        say(f"  {count} streams: {added:.2f} ms added at p99, {figures['late']} late{trusted}")
        return figures if added <= ADDED_MS and not figures["late"] else None

    def _streams(self, name: str, contender: Contender, count: int) -> dict[str, Any]:
        tokens = self.tokens
        with Meter(contender.groups("paced")) as meter:
            figures = load.streams(contender.port("paced"), "paced", contender.key, count, tokens, INTERVAL_US)
        figures |= {"streams": count}
        gateway = meter.spent.get("gateway")
        if gateway is not None:
            figures["cpu_us an event"] = gateway.cpu_s / (count * tokens) * 1e6
        if figures["complaint"] and not figures["answers"]:
            raise LoadError(figures["complaint"])
        self.found.add(name, contender.name, figures, meter, count * tokens)
        return figures

    def _check(self, figures: dict[str, Any]) -> None:
        if figures["incomplete"]:
            raise LoadError(f"{figures['incomplete']} streams incomplete: {figures['complaint']}")


def say(text: str) -> None:
    print(f"gateway bench: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections")
    names = ("LiteLLM", "vllm-router", "Fanlight")
    parser.add_argument("--peers", nargs="*", choices=names, default=list(names), help="these contenders")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    options = parser.parse_args()
    bench = Bench(options)
    with bench.started(options.peers):
        bench.run()
    if options.json:
        print(json.dumps(report(bench.found), indent=1))
    else:
        print(json.dumps(bench.found.configurations, indent=1))
        show(bench.found)
    return int(failed(bench.found))


if __name__ == "__main__":
    raise SystemExit(main())
