"""What bench/engine.py measured as medians, ratios with their bars, and tables."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.engine_alone import Check
from bench.engine_cases import Case, Metrics, Tokens, faster
from bench.engine_servers import Contender, contenders

RIVALS = ("vllm", "llama")
UNITS = {"tok_s": "tok/s", "ttft_ms": "TTFT ms", "second_ttft_ms": "second TTFT ms"}


@dataclass
class Sample:
    """One run of a case on one server."""

    case: str
    contender: str
    metrics: Metrics
    others: float  # share of the cores' time that neither the server nor this client took
    load_average: float


@dataclass
class Findings:
    """All that a run of the bench found out. `precisions`: what the weights of each server that ran are kept in."""

    cases: list[Case]
    entrants: list[Contender]
    samples: list[Sample] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    precisions: dict[str, str] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = True

    def precision(self, name: str) -> str:
        return self.precisions.get(name, contenders()[name].precision)

    def medians(self, case: Case, name: str) -> Metrics:
        """Median of every metric over the rounds, and the best of the case's own."""
        runs = [sample for sample in self.samples if (sample.case, sample.contender) == (case.name, name)]
        if not runs:
            return {}
        figures = {metric: statistics.median(run.metrics[metric] for run in runs) for metric in runs[0].metrics}
        return figures | {
            "best": max((run.metrics[case.metric] for run in runs), key=lambda value: value * faster(case)),
            "others": statistics.median(run.others for run in runs),
        }

    def times_better(self, case: Case, ours: str, side: str) -> tuple[float | None, str]:
        """Ours against the best configuration of a rival, and which that was."""
        mine = self.medians(case, ours).get(case.metric)
        theirs = [
            (figures[case.metric], name)
            for name, each in contenders().items()
            if each.side == side and (figures := self.medians(case, name))
        ]
        value, rival = max(theirs, key=lambda each: each[0] * faster(case)) if theirs else (None, side)
        return ((mine / value) ** faster(case) if mine and value else None), rival


def report(found: Findings) -> dict[str, Any]:
    """Everything that was measured, for --json and for the tables."""
    figures = [
        {"case": case.name, "contender": name, "precision": found.precision(name)}
        | {metric: round(value, 3) for metric, value in found.medians(case, name).items()}
        for case in found.cases
        for name in case.servers or [each.name for each in found.entrants]
    ]
    checks = all_checks(found)
    return {
        "figures": figures,
        "ratios": [row for case in found.cases for row in ratios(found, case)],
        "checks": [asdict(check) | {"verdict": check.verdict} for check in checks],
        "starts_s": {name: round(seconds, 1) for name, seconds in found.starts.items()},
        "seconds": round(found.seconds),
        "complete": found.complete,
        "samples": [asdict(sample) for sample in found.samples],
    }


def all_checks(found: Findings) -> list[Check]:
    """What was measured of ours alone, and the bars that cases set for ours."""
    return found.checks + [check for case in found.cases for check in own_checks(found, case)]


def own_checks(found: Findings, case: Case) -> list[Check]:
    """The bars that a case sets for our servers by themselves."""
    checks = []
    for bar in case.own_bars:
        value, label = found.medians(case, bar.server).get(bar.figure), found.precision(bar.server)
        checks.append(Check(case.name, bar.figure, bar.server, label, value, "×", bar.limit, bar.at_most))
    return checks


def ratios(found: Findings, case: Case) -> list[dict[str, Any]]:
    """Each of our servers against each rival, with the bar, the verdict, and our bf16 path's ratio beside it."""
    if case.servers:
        return []
    rows = []
    for side in RIVALS:
        plain, _ = found.times_better(case, "ours-bf16", side)
        for ours in (each.name for each in found.entrants if each.side == "ours"):
            ratio, rival = found.times_better(case, ours, side)
            bar = case.bars.get((ours, side))
            rows.append({
                "case": case.name, "metric": case.metric, "ours": ours, "our_precision": found.precision(ours),
                "rival": rival, "rival_precision": found.precision(rival) if rival in contenders() else "",
                "times_better": ratio and round(ratio, 2), "bar": bar, "verdict": verdict(ratio, bar),
                "bf16_times_better": plain and round(plain, 2),
            })  # fmt: skip
    return rows


def verdict(ratio: float | None, bar: float | None) -> str:
    """A bar without a measurement is not met, and says so."""
    if ratio is None:
        return "NOT RUN"
    return "" if bar is None else "pass" if ratio >= bar else "FAIL"


def failed(result: dict[str, Any]) -> bool:
    """Whether a bar is not met or something was not run."""
    return any(row["verdict"] in ("FAIL", "NOT RUN") for row in result["ratios"] + result["checks"])


def show(result: dict[str, Any], cases: list[Case]) -> None:
    """The tables a person reads."""
    usual = {case.name for case in cases if isinstance(case, Tokens)}
    head = f"{'case':13} {'server':14} {'weights':28} {'tok/s':>8} {'TTFT ms':>9} {'ITL p50':>8} {'p99 ms':>8}"
    print(f"{head} {'best':>9} others")
    for row in result["figures"]:
        start = f"{row['case']:13} {row['contender']:14} {row['precision']:28}"
        if "others" not in row:
            print(f"{start} NOT RUN")
        elif row["case"] in usual:
            print(
                f"{start} {row['tok_s']:8.1f} {row['ttft_ms']:9.1f} {row['itl_p50_ms']:8.2f} {row['itl_p99_ms']:8.2f}"
                f" {row['best']:9.1f} {row['others']:6.1%}"
            )
        else:
            print(start, ", ".join(f"{name} {value:.2f}" for name, value in list(row.items())[3:] if name != "best"))
    _show_ratios(result["ratios"])
    _show_checks(result["checks"])
    starts = ", ".join(f"{name} {seconds} s" for name, seconds in result["starts_s"].items())
    print(f"\nFrom spawn to /health, warm files: {starts}\nAll of it took {result['seconds'] / 60:.1f} minutes.")


def _show_ratios(rows: list[dict[str, Any]]) -> None:
    print()
    for row in rows:
        times = f"{row['times_better']:6.2f}×" if row["times_better"] else "      –"
        bar = f"bar {row['bar']:.2f}×" if row["bar"] else ""
        plain = f"{row['bf16_times_better']:.2f}×" if row["bf16_times_better"] else "–"
        beside = f"[bf16 {plain}]" if row["ours"] != "ours-bf16" else ""
        sides = f"{row['ours']} ({row['our_precision']}) against {row['rival']} ({row['rival_precision']})"
        print(f"{row['case']:13} {row['metric']:14} {sides:70} {times} {beside:13} {bar:9} {row['verdict']}")


def _show_checks(rows: list[dict[str, Any]]) -> None:
    print()
    for row in rows:
        bar = f"bar {'≤' if row['at_most'] else '≥'} {row['bar']:g}" if row["bar"] is not None else ""
        what = f"{row['what']}, {row['server']} ({row['precision']})"
        value = f"{row['value']:9.2f}" if row["value"] is not None else f"{'–':>9}"
        print(f"{row['case']:13} {what:100} {value} {row['unit']:2} {bar:9} {row['verdict']}")


def markdown(found: Findings) -> str:
    """The tables of docs/engine.md: medians, then the ratios to the rivals, then what stands by itself."""
    cases = [case for case in found.cases if not case.servers]
    tables = [_medians(found, cases), _ratios(found, cases)] if cases else []
    rows = [
        [check.case, f"{check.what} ({check.precision})", _figure(check), _limit(check)] for check in all_checks(found)
    ]
    return "\n\n".join([*tables, _table(["by itself", "what", "figure", "bar"], rows)])


def _medians(found: Findings, cases: list[Case]) -> str:
    names = [each.name for each in found.entrants]
    rows = []
    for case in cases:
        figures = [found.medians(case, name).get(case.metric) for name in names]
        rows.append([f"{case.name}, {UNITS[case.metric]}", *(f"{value:.0f}" if value else "–" for value in figures)])
    return _table(["medians", *(f"{name}, {found.precision(name)}" for name in names)], rows)


def _ratios(found: Findings, cases: list[Case]) -> str:
    """A row for each case and rival, so that the bf16 ratio stands beside those of quantised weights."""
    ours = [each.name for each in found.entrants if each.side == "ours"]
    rows = []
    for case in cases:
        for side in RIVALS:
            rival = found.times_better(case, ours[0], side)[1] if ours else side
            against = f"{rival}, {found.precision(rival)}" if rival in contenders() else side
            rows.append([case.name, against, *(_cell(found, case, name, side) for name in ours)])
    return _table(["times better (bar)", "than", *(f"{name}, {found.precision(name)}" for name in ours)], rows)


def _cell(found: Findings, case: Case, ours: str, side: str) -> str:
    """A ratio with its bar; one that misses it is bold."""
    ratio, _ = found.times_better(case, ours, side)
    bar = case.bars.get((ours, side))
    if ratio is None:
        return "–"
    if bar is None:
        return f"{ratio:.2f}"
    return f"{ratio:.2f} ({bar:.2f})" if ratio >= bar else f"**{ratio:.2f}** ({bar:.2f})"


def _figure(check: Check) -> str:
    return f"{check.value:.2f} {check.unit}" if check.value is not None else "not run"


def _limit(check: Check) -> str:
    if check.bar is None:
        return ""
    missed = ", **missed**" if check.verdict == "FAIL" else ""
    return f"{'≤' if check.at_most else '≥'} {check.bar:g}{missed}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
