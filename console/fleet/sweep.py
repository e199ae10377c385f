"""How many sequences a worker should run at once: more of them stepwise, until latency or memory objects. Pure.

What a step is judged by comes from `fleet.sweeping`, which asks a real worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

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
    prompt_tokens: int  # of one request, as the engine counted them
    kv_peak: float  # share of its blocks in use, at most
    preemptions: int
    waited: bool  # for blocks, while fewer ran than may
    error: str = ""  # of the first that failed


@dataclass(frozen=True)
class Verdict:
    """How a sweep ended: the number that it advises, None where not even one was good, and why it went no further."""

    best: Step | None
    stopped_by: Mapping[str, Any]  # a code and its figures; see `words`


def numbers(most: int) -> Iterator[int]:
    """1, 2, 4, … up to `most`, which is the last one."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most


def objection(step: Step, p99_limit_s: float | None) -> dict[str, Any]:
    """Why this many are too many; empty where they are not."""
    at = {"at": step.sequences}
    if step.failed:
        return {"code": "failed", **at, "count": step.failed, "all": step.requests, "error": step.error}
    if step.preemptions:
        return {"code": "preempted", **at, "count": step.preemptions, "share": f"{step.kv_peak:.0%}"}
    if step.waited:
        return {"code": "full", **at, "share": f"{step.kv_peak:.0%}"}
    if p99_limit_s is not None and step.p99_s > p99_limit_s:
        return {"code": "p99", **at, "p99": f"{step.p99_s:.2f}", "limit": f"{p99_limit_s:g}"}
    return {}


def judge(steps: Sequence[Step], p99_limit_s: float | None) -> Verdict:
    """The smallest number that brings all but WORTH of the most tokens a second, of those that nothing objects to."""
    objections = [objection(step, p99_limit_s) for step in steps]
    good = [step for step, against in zip(steps, objections, strict=True) if not against]
    end = {"code": "most", "at": steps[-1].sequences} if steps else {}
    stopped_by = next(filter(None, objections), end)
    if not good:
        return Verdict(None, stopped_by)
    fastest = max(step.tokens_s for step in good)
    return Verdict(next(step for step in good if step.tokens_s >= fastest * (1 - WORTH)), stopped_by)


def words(stopped_by: Mapping[str, Any]) -> str:
    """Why a sweep went no further, as a sentence."""
    told = {
        "failed": _("%(count)s of %(all)s requests failed at %(at)s: %(error)s"),
        "preempted": _("Memory: %(count)s sequences were preempted at %(at)s, with %(share)s of KV in use."),
        "full": _("Memory: requests waited for KV blocks at %(at)s, with %(share)s of them in use."),
        "p99": _("P99 was %(p99)s s at %(at)s, and may be %(limit)s s."),
        "most": _("%(at)s is what it was started with."),
        "silent": _("The worker did not tell its state any more at %(at)s: %(error)s"),
    }
    sentence = told.get(str(stopped_by.get("code")))
    return sentence % stopped_by if sentence else ""
