"""The order in which a policy would have the replicas of one deployment, best first, each with its score."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from serving.port import Replica, ReplicaLoad
from serving.routing import rendezvous
from serving.routing.candidate import Candidate
from serving.routing.hints import LOAD_AWARE, PREFIX_AWARE, ROUND_ROBIN, SESSION_AFFINITY

LOAD_CAP = 0.25
"""A replica whose share of slots in use is over the smallest by more than this is never preferred for what it keeps."""

_FRESH_S, _STALE_S = 3.0, 10.0  # a load report counts in full until the first, not at all from the second
_WEIGHTS = (("kv", 0.3), ("waiting", 0.2), ("gpu", 0.1), ("memory", 0.1))  # the rest is slots
_SLOTS_WEIGHT = 0.3
_OVER_CAP = "over the load cap"


class Ranked(msgspec.Struct, frozen=True):
    """A candidate in its place. Lower scores are better; None: it was not considered, the verdict says why."""

    candidate: Candidate
    score: float | None
    verdict: str = ""

    @property
    def replica(self) -> Replica:
        return self.candidate.replica


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates of one decision."""

    policy: str
    reason: str  # why the first is the first, or why there is none
    ranked: tuple[Ranked, ...]  # best first
    excluded: tuple[Ranked, ...] = ()
    least: bool = False  # whoever grants slots should take the smallest share in use; the order only breaks ties


class Turns:
    """A turn for each pool: one counter over all of them would let replicas starve behind another pool's rhythm."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def next(self, pool: str) -> int:
        turn = self._turns[pool] = self._turns.get(pool, -1) + 1
        return turn

    def prune(self, pools: Collection[str]) -> None:
        """Forget the pools that are gone."""
        self._turns = {pool: turn for pool, turn in self._turns.items() if pool in pools}


def rank(
    policy: str,
    candidates: Sequence[Candidate],
    *,
    turn: int,
    now: float = 0.0,
    affinity: str = "",
    avoid: Collection[str] = (),
    only: str = "",
) -> Ranking:
    """Rank for one request.

    `turn` of the pool rotates equals; `now` (wall seconds) ages load reports; `affinity` is the session or the key;
    `avoid` names replicas that have just failed this request (taken only where there is no other); `only` is the one
    replica that may take it, if not empty. The order of `candidates` does not matter.
    """
    verdicts = {each.replica.id: _excluded(each, only) for each in candidates}
    able = sorted((each for each in candidates if not verdicts[each.replica.id]), key=lambda each: each.replica.id)
    fresh = [each for each in able if each.replica.id not in avoid] or able
    shift = turn % len(fresh) if fresh else 0
    ranked, reason, least = _order(policy, fresh[shift:] + fresh[:shift], now, affinity)
    kept = {each.replica.id for each in ranked}
    left_out = tuple(
        Ranked(each, None, verdicts[each.replica.id] or "just failed")
        for each in candidates
        if each.replica.id not in kept
    )
    if not ranked:
        reason = _why_nobody(candidates)
    return Ranking(policy=policy, reason=reason, ranked=tuple(ranked), excluded=left_out, least=least)


def _why_nobody(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "the route has no replica"
    ready = any(each.replica.state == "ready" for each in candidates)
    return "no replica can take it" if ready else "no replica is ready"


def _excluded(candidate: Candidate, only: str) -> str:
    """Why a candidate cannot take it; empty if it can."""
    if candidate.replica.state != "ready":
        return candidate.replica.state
    if candidate.verdict:
        return candidate.verdict
    return "another one was asked for" if only and candidate.replica.id != only else ""


def _order(policy: str, able: list[Candidate], now: float, affinity: str) -> tuple[list[Ranked], str, bool]:
    """Ranked candidates, the reason for the first, and whether least in use decides. `able` is in turn order."""
    if len(able) < 2:
        return [Ranked(each, round(each.share, 4)) for each in able], "the only replica that can take it", False
    if policy == ROUND_ROBIN:
        return [Ranked(each, float(place)) for place, each in enumerate(able)], "its turn", False
    if policy == LOAD_AWARE:
        return _by_score(able, _loads(able, now)), "the least loaded", False
    if policy == PREFIX_AWARE:
        longest = max(each.cached_tokens for each in able)
        if longest:
            kept = [1 - each.cached_tokens / longest for each in able]
            return _capped(able, kept, "the longest prefix is expected in its cache")
    if policy == SESSION_AFFINITY and affinity:
        kept = [1 - rendezvous.uniform(affinity, each.replica.id) for each in able]
        return _capped(able, kept, "its session is kept here")
    prefix = "no cached prefix is expected anywhere; " if policy == PREFIX_AWARE else ""
    return _by_score(able, [each.share for each in able]), prefix + "the fewest slots in use", True


def _by_score(able: Sequence[Candidate], scores: Sequence[float]) -> list[Ranked]:
    """Lowest first; sorting is stable, so that equals stay in turn order."""
    return sorted((Ranked(each, round(score, 4)) for each, score in zip(able, scores, strict=True)), key=_score)


def _score(ranked: Ranked) -> float:
    assert ranked.score is not None
    return ranked.score


def _capped(able: Sequence[Candidate], kept: Sequence[float], reason: str) -> tuple[list[Ranked], str, bool]:
    """By what is kept (0 best, 1 nothing) among those within the cap, then the others by load."""
    cap = min(each.share for each in able) + LOAD_CAP
    ranked = [
        Ranked(each, round(1 + each.share, 4), _OVER_CAP) if each.share > cap else Ranked(each, round(score, 4))
        for each, score in zip(able, kept, strict=True)
    ]
    ranked.sort(key=lambda each: (each.score, each.candidate.share))
    best = min(kept)
    passed_over = any(each.share > cap and score == best for each, score in zip(able, kept, strict=True))
    return ranked, f"{reason} within the load cap" if passed_over else reason, False


def _loads(able: Sequence[Candidate], now: float) -> list[float]:
    """Weighted sums of 0..1. What a replica does not tell, or told long ago, is taken to be as its peers' mean."""
    trusts = [_trust(each.load, now) for each in able]
    parts = [_parts(each) for each in able]
    sums = [_SLOTS_WEIGHT * min(each.share, 1.0) for each in able]
    for name, weight in _WEIGHTS:
        told = [(trust, part[name]) for trust, part in zip(trusts, parts, strict=True) if name in part and trust]
        weights = sum(trust for trust, _ in told)
        mean = sum(trust * value for trust, value in told) / weights if weights else 0.0
        for place, (trust, part) in enumerate(zip(trusts, parts, strict=True)):
            sums[place] += weight * (trust * (part.get(name, mean) - mean) + mean)
    return sums


def _parts(candidate: Candidate) -> dict[str, float]:
    load = candidate.load
    if load is None:
        return {}
    slots = candidate.replica.max_num_seqs or 1
    parts = {"kv": load.kv_usage, "waiting": min(load.waiting / slots, 1.0)}
    if load.gpu_utilisation is not None:
        parts["gpu"] = load.gpu_utilisation
    if load.gpu_memory is not None:
        parts["memory"] = load.gpu_memory
    return parts


def _trust(load: ReplicaLoad | None, now: float) -> float:
    """1 for a fresh report, falling to 0 for a stale one; one from the future is fresh."""
    if load is None:
        return 0.0
    return min(max((_STALE_S - (now - load.at)) / (_STALE_S - _FRESH_S), 0.0), 1.0)
