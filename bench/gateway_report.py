"""What bench/gateway.py measured, as medians over interleaved rounds, ratios, and bars."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.gateway_processes import Meter

Figures = dict[str, float]


@dataclass
class Sample:
    """One run of one load on one contender."""

    load: str
    contender: str
    figures: Figures


@dataclass(frozen=True)
class Bar:
    """A figure that must be reached. `value` None: it was not measured."""

    what: str
    value: float | None
    unit: str
    limit: float
    at_most: bool

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "NOT RUN"
        return "pass" if (self.value <= self.limit) == self.at_most or self.value == self.limit else "FAIL"


@dataclass
class Findings:
    """All that a run of the bench found out."""

    samples: list[Sample] = field(default_factory=list)
    configurations: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)  # what, and why
    seconds: float = 0.0

    def add(
        self, load: str, contender: str, figures: dict[str, Any], meter: Meter | None = None, per: float = 0
    ) -> None:
        """Keep the numbers of a run; with a meter also CPU microseconds per piece of work, and memory."""
        numbers = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        if meter is not None and per:
            numbers |= {f"cpu_us {name}": spent.cpu_s / per * 1e6 for name, spent in meter.spent.items()}
            numbers |= {f"rss_mib {name}": spent.rss_mib for name, spent in meter.spent.items()}
        self.samples.append(Sample(load, contender, numbers))

    def median(self, load: str, contender: str, figure: str) -> float | None:
        runs = [each for each in self.samples if (each.load, each.contender) == (load, contender)]
        values = [each.figures[figure] for each in runs if figure in each.figures]
        return statistics.median(values) if values else None

    def ratio(self, load: str, ours: str, theirs: str, figure: str) -> float | None:
        """Ours over theirs, of medians in this run."""
        mine, other = self.median(load, ours, figure), self.median(load, theirs, figure)
        return mine / other if mine is not None and other else None

    def added(self, load: str, contender: str, figure: str) -> float | None:
        """What is more than in the direct runs."""
        through, direct = self.median(load, contender, figure), self.median(load, "direct", figure)
        return through - direct if through is not None and direct is not None else None

    def names(self, load: str) -> list[str]:
        return list(dict.fromkeys(each.contender for each in self.samples if each.load == load))


def bars(found: Findings) -> list[Bar]:
    """What the gateway must reach."""
    late = found.median("paced", "Fanlight", "late")
    return [
        Bar("requests/s against LiteLLM", found.ratio("throughput", "Fanlight", "LiteLLM", "requests_s"), "×", 25, False),
        Bar("requests/s against vllm-router", found.ratio("throughput", "Fanlight", "vllm-router", "requests_s"), "×", 0.15, False),
        Bar("added latency p50, one client", found.added("latency", "Fanlight", "p50_ms"), "ms", 0.8, True),
        Bar("added delay of a token p99, 256 streams", found.added("paced", "Fanlight", "p99_ms"), "ms", 5, True),
        Bar("late streams of 256", late, "", 0, True),
        Bar("CPU per request, two processes against one", found.ratio("two", "two processes", "one process", "cpu_us gateway"), "×", 1.1, True),
    ]  # fmt: skip


def report(found: Findings) -> dict[str, Any]:
    """Everything, for --json."""
    return {
        "bars": [asdict(each) | {"verdict": each.verdict} for each in bars(found)],
        "figures": [
            {"load": load, "contender": name} | _medians(found, load, name)
            for load in dict.fromkeys(each.load for each in found.samples)
            for name in found.names(load)
        ],
        "not_run": found.not_run,
        "configurations": found.configurations,
        "seconds": round(found.seconds),
        "samples": [asdict(each) for each in found.samples],
    }


def show(found: Findings) -> None:
    """The tables a person reads."""
    for load in dict.fromkeys(each.load for each in found.samples):
        print(f"\n{load}")
        for name in found.names(load):
            figures = _medians(found, load, name)
            told = ", ".join(
                f"{figure} {value:,.3g}" if value < 1000 else f"{figure} {value:,.0f}"
                for figure, value in figures.items()
            )
            print(f"  {name:14} {told}")
    print()
    for name, why in found.not_run.items():
        print(f"{name}: NOT RUN: {why}")
    for each in bars(found):
        value = "–" if each.value is None else f"{each.value:.3f}"
        print(
            f"{each.what:48} {value:>9} {each.unit:2} bar {'≤' if each.at_most else '≥'} {each.limit:<5g} {each.verdict}"
        )
    print(f"\nAll of it took {found.seconds / 60:.1f} minutes. Two cores: the gateway on 0, everything else on 1.")


def failed(found: Findings) -> bool:
    return any(each.verdict != "pass" for each in bars(found))


def _medians(found: Findings, load: str, name: str) -> Figures:
    """Medians, without processes that took nothing worth telling."""
    runs = [each.figures for each in found.samples if (each.load, each.contender) == (load, name)]
    figures = list(dict.fromkeys(figure for run in runs for figure in run))
    told = {figure: found.median(load, name, figure) or 0.0 for figure in figures}
    return {
        figure: round(value, 4) for figure, value in told.items() if value or not figure.startswith(("cpu_us", "rss"))
    }
