"""A route's objectives beside what was measured, and how much of each error budget is left. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from console.fleet.models import Route
from console.telemetry.route_figures import Measured

P99_SHARE = 0.01  # of requests that may be over an objective for the 99th percentile


@dataclass(frozen=True)
class Attained:
    """One objective over one window. `value` is in the objective's own unit; None where nobody measured."""

    window: str  # a key of telemetry.windows.RANGES
    value: float | None
    requests: int
    budget_left: float | None  # share of the bad requests it allows that were not used; below 0: broken
    kept: bool | None  # None: no objective, or nothing measured


@dataclass(frozen=True)
class Objective:
    """A promise and how it was kept over each window."""

    title: str
    unit: str  # "share", "ms", or "" for a ratio
    promised: float | None
    attained: Sequence[Attained]


def objectives(route: Route, measured: Sequence[tuple[str, Measured]]) -> list[Objective]:
    """Every objective of a route over windows named by their key."""
    availability, jitter = route.objective_availability, route.objective_jitter
    ttft, itl = route.objective_ttft_p99_ms, route.objective_itl_p99_ms

    def each(promised: float | None, one: Measured, name: str) -> tuple[float | None, tuple[int, int], float | None]:
        match name:
            case "availability":
                n, bad = one.availability
                return (1 - bad / n if n else None), (n, bad), None if promised is None else 1 - promised
            case "ttft":
                return _ms(one.ttft_p99_us), one.ttft, P99_SHARE
            case "itl":
                return _ms(one.itl_p99_us), one.itl, P99_SHARE
            case _:
                return one.jitter, (one.itl[0], 0), None

    def row(title: str, unit: str, promised: float | None, name: str) -> Objective:
        found = [(window, *each(promised, one, name)) for window, one in measured]
        return Objective(title, unit, promised, [_attained(promised, name, *figures) for figures in found])

    return [
        row(_("Availability"), "share", availability, "availability"),
        row(_("TTFT p99"), "ms", ttft, "ttft"),
        row(_("ITL p99"), "ms", itl, "itl"),
        row(_("Jitter, p99 ÷ p50"), "", jitter, "jitter"),
    ]


def _attained(
    promised: float | None,
    name: str,
    window: str,
    value: float | None,
    counts: tuple[int, int],
    allowed: float | None,
) -> Attained:
    requests, bad = counts
    if promised is None or value is None or not requests:
        return Attained(window, value, requests, None, None)
    kept = value >= promised if name == "availability" else value <= promised
    left = None if allowed is None or name == "jitter" else budget_left(requests, bad, allowed)
    return Attained(window, value, requests, left, kept)


def budget_left(requests: int, bad: int, allowed: float) -> float:
    """Share of the allowed bad requests that were not used: 1 none used, 0 all, below 0 more than all."""
    budget = requests * allowed
    if budget == 0:  # everything was promised
        return 1.0 if not bad else -float(bad)
    return 1 - bad / budget


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1000
