"""Whether a canary may stay: a sequential judgement that may be asked as often as one likes.

Each promise (errors, first tokens, gaps) is a proportion: the share of requests that failed, or that were over the
objective. The hypothesis "the canary's share is at most what is allowed, or at most the stable target's" is given up
once its e-value reaches 1/alpha: the likelihood of the data under a mixture of all pairs of shares, over the largest
likelihood that the hypothesis can give it (universal inference: Wasserman, Ramdas and Balakrishnan 2020). Under the
hypothesis such a quotient ever reaches 1/alpha with probability alpha at most (Ville's inequality), however often it
is looked at. It takes requests to be independent draws; see docs/decisions/0013-sequential-canary.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from serving.port import Objectives

CONTINUE, ROLLBACK, PASS = "continue", "rollback", "pass"
P99_SHARE = 0.01  # of requests that may be over an objective for the 99th percentile
DEFAULT_ERRORS = 0.01  # allowed share of errors where a route promises nothing
_NOBODY = (0, 0)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How sure one wants to be."""

    alpha: float = 0.01  # probability of ever rolling back a canary that is as good as stable or as promised
    beta: float = 0.05  # probability of ever passing one that is `margin` times worse
    margin: float = 3.0  # a canary passes once it is shown to be better than this many times what is allowed
    least: int = 100  # requests of a canary before it may pass


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one target: (requests, bad ones) for each promise, since the canary began."""

    errors: tuple[int, int] = _NOBODY
    ttft: tuple[int, int] = _NOBODY  # bad: first token later than the objective
    itl: tuple[int, int] = _NOBODY  # bad: the request's own p99 gap is over the objective


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One promise as judged; evidence is the logarithm of an e-value, to be compared with what is needed."""

    name: str
    stable: tuple[int, int]
    canary: tuple[int, int]
    allowed: float
    worse: float  # evidence that the canary is worse than allowed and worse than stable
    worse_needed: float
    fine: float  # evidence that it is not `margin` times worse
    fine_needed: float

    def told(self) -> str:
        """In words."""
        (n, bad), (others, theirs) = self.canary, self.stable
        return (
            f"{self.name}: {bad} of {n} requests of the canary ({_percent(bad, n)}), {theirs} of {others} of stable"
            f" ({_percent(theirs, others)}), {self.allowed:.2%} allowed"
        )


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, why, and the figures."""

    action: str  # continue, rollback or pass
    reason: str
    measures: tuple[Measure, ...]


def observed(requests: Iterable[tuple[bool, float | None, float | None]], objectives: Objectives) -> Observed:
    """Count requests (failed, TTFT in ms, own p99 gap in ms; None: has none) against the objectives.

    Leave out what says nothing of a target: refusals and clients that left.
    """
    errors, ttft, itl = [0, 0], [0, 0], [0, 0]
    for failed, first, gap in requests:
        _count(errors, failed)
        if first is not None and objectives.ttft_p99_ms is not None:
            _count(ttft, first > objectives.ttft_p99_ms)
        if gap is not None and objectives.itl_p99_ms is not None:
            _count(itl, gap > objectives.itl_p99_ms)
    return Observed(errors=(errors[0], errors[1]), ttft=(ttft[0], ttft[1]), itl=(itl[0], itl[1]))


def judge(stable: Observed, canary: Observed, objectives: Objectives, rules: Rules = Rules()) -> Verdict:  # noqa: B008
    """Judge a canary by everything seen so far. Act on the first rollback: the guarantee covers all looks together."""
    promised = [("errors", 1 - objectives.availability if objectives.availability is not None else DEFAULT_ERRORS)]
    promised += [("ttft", P99_SHARE)] if objectives.ttft_p99_ms is not None else []
    promised += [("itl", P99_SHARE)] if objectives.itl_p99_ms is not None else []
    needed = math.log(len(promised) / rules.alpha), math.log(1 / rules.beta)
    measures = tuple(
        _measure(name, getattr(stable, name), getattr(canary, name), allowed, rules.margin, needed)
        for name, allowed in promised
    )
    broken = [each for each in measures if each.worse >= each.worse_needed]
    if broken:
        return Verdict(action=ROLLBACK, reason="; ".join(each.told() for each in broken), measures=measures)
    open_ones = [each for each in measures if each.fine < each.fine_needed]
    if not open_ones and canary.errors[0] >= rules.least:
        told = "; ".join(each.told() for each in measures)
        return Verdict(
            action=PASS, reason=f"less than {rules.margin:g} times what is allowed: {told}", measures=measures
        )
    reason = f"not decided yet: {'; '.join(each.told() for each in open_ones or measures)}"
    return Verdict(action=CONTINUE, reason=reason, measures=measures)


def _measure(
    name: str,
    stable: tuple[int, int],
    canary: tuple[int, int],
    allowed: float,
    margin: float,
    needed: tuple[float, float],
) -> Measure:
    seen = _mixture(*stable) + _mixture(*canary)
    return Measure(
        name=name,
        stable=stable,
        canary=canary,
        allowed=allowed,
        worse=seen - _best_if_not_worse(stable, canary, allowed),
        worse_needed=needed[0],
        fine=seen - _best_if_worse(stable, canary, allowed, margin),
        fine_needed=needed[1],
    )


def _best_if_not_worse(stable: tuple[int, int], canary: tuple[int, int], allowed: float) -> float:
    """Largest log-likelihood with canary <= allowed, or canary <= stable."""
    within = _likelihood(*canary, min(_share(*canary), allowed)) + _likelihood(*stable, _share(*stable))
    if _share(*canary) <= _share(*stable):
        return max(within, _likelihood(*canary, _share(*canary)) + _likelihood(*stable, _share(*stable)))
    pooled = _share(canary[0] + stable[0], canary[1] + stable[1])
    return max(within, _likelihood(*canary, pooled) + _likelihood(*stable, pooled))


def _best_if_worse(stable: tuple[int, int], canary: tuple[int, int], allowed: float, margin: float) -> float:
    """Largest log-likelihood with canary >= margin * max(allowed, stable)."""

    def at(share: float) -> float:
        bound = min(margin * max(allowed, share), 1.0)
        return _likelihood(*stable, share) + _likelihood(*canary, max(_share(*canary), bound))

    return _largest(at, 0.0, 1 / margin)


def _largest(function: Callable[[float], float], low: float, high: float) -> float:
    """Maximum of a concave function, to a hundred-thousandth of the interval."""
    for _ in range(30):
        third = (high - low) / 3
        if function(low + third) < function(high - third):
            low += third
        else:
            high -= third
    return function((low + high) / 2)


def _mixture(count: int, bad: int) -> float:
    """Log-likelihood of a sequence, averaged over all shares: half by Jeffreys' prior, half by one for rare events."""
    jeffreys = _beta(bad + 0.5, count - bad + 0.5) - _beta(0.5, 0.5)
    rare = _beta(bad + 1, count - bad + 50) - _beta(1, 50)
    larger = max(jeffreys, rare)
    return larger + math.log((math.exp(jeffreys - larger) + math.exp(rare - larger)) / 2)


def _beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _likelihood(count: int, bad: int, share: float) -> float:
    """Log-likelihood of a sequence with these counts."""
    total = 0.0
    for times, probability in ((bad, share), (count - bad, 1 - share)):
        if times:
            total += times * math.log(probability) if probability > 0 else -math.inf
    return total


def _share(count: int, bad: int) -> float:
    return bad / count if count else 0.0


def _count(counts: list[int], bad: bool) -> None:
    counts[0] += 1
    counts[1] += bad


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "none"
