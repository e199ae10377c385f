"""How many sequences a worker should run at once: more of them stepwise, until latency or memory objects. Pure.

What a step is judged by comes from `fleet.sweeping`, which asks a real worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WORTH = 0.03  # more tokens a second than this, or the larger batch only makes everyone wait
FULL = 0.97  # of its KV blocks


@dataclass(frozen=True)
class Step:
    """What one number of sequences at once brought. Latencies are those of whole requests."""

    sequences: int
    requests: int
    failed: int
    p50_s: float
    p99_s: float
    tokens_s: float  # generated, all sequences together
    kv_peak: float  # share of its blocks in use, at most
    preemptions: int
    waited: bool  # for blocks, while fewer ran than may


@dataclass(frozen=True)
class Verdict:
    """How a sweep ended: the number that it advises, None where not even one was good, and why it went no further."""

    best: Step | None
    stopped_by: str


def numbers(most: int) -> Iterator[int]:
    """1, 2, 4, … up to `most`, which is the last one."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most


def objection(step: Step, p99_limit_s: float | None) -> str:
    """Why this many are too many; empty where they are not."""
    if step.failed:
        return f"{step.failed} of {step.requests} requests failed at {step.sequences}"
    if step.preemptions:
        return (
            f"Memory: {step.preemptions} sequences were preempted at {step.sequences}, {step.kv_peak:.0%} of KV in use"
        )
    if step.waited:
        return f"Memory: requests waited for KV blocks at {step.sequences}, {step.kv_peak:.0%} of them in use"
    if p99_limit_s is not None and step.p99_s > p99_limit_s:
        return f"P99 was {step.p99_s:.2f} s at {step.sequences}, and may be {p99_limit_s:g} s"
    return ""


def judge(steps: Sequence[Step], p99_limit_s: float | None) -> Verdict:
    """The smallest number that brings all but WORTH of the most tokens a second, of those that nothing objects to."""
    objections = [objection(step, p99_limit_s) for step in steps]
    good = [step for step, against in zip(steps, objections, strict=True) if not against]
    stopped_by = next(filter(None, objections), f"{steps[-1].sequences} is what it was started with" if steps else "")
    if not good:
        return Verdict(None, stopped_by)
    fastest = max(step.tokens_s for step in good)
    return Verdict(next(step for step in good if step.tokens_s >= fastest * (1 - WORTH)), stopped_by)
