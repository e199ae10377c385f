"""Which replica takes a request. Pure: candidates in, a Decision with its reasons out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from serving.port import Replica, ReplicaLoad

ROUND_ROBIN = "round-robin"
LEAST_CONNECTIONS = "least-connections"
MAX_RECORDED = 16


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wishes of routing. All but the session are for principals that may override."""

    policy: str = ""
    target: str = ""  # name or id of a deployment
    replica: str = ""  # name or id of a replica
    session: str = ""  # requests of one session stay together under session affinity
    retry: int = 0  # which try of the same call this is, as the client tells it


NO_HINTS = Hints()


class Candidate(msgspec.Struct, frozen=True):
    """A replica and what is known of its load at this moment."""

    replica: Replica
    in_flight: int  # of this gateway
    load: ReplicaLoad | None = None


class Decision(msgspec.Struct, frozen=True):
    """A choice with everything that it was made by, as it goes into the record."""

    replica: Replica | None
    policy: str
    reason: str
    candidates: list[dict[str, Any]]


def choose(policy: str, candidates: Sequence[Candidate], *, turn: int, avoid: Collection[str] = ()) -> Decision:
    """Choose among the ready candidates; `turn` rotates ties, `avoid` names replicas that have just failed."""
    ready = [c for c in candidates if c.replica.state == "ready"]
    fresh = [c for c in ready if c.replica.id not in avoid] or ready
    if not fresh:
        reason = "no replica is ready" if candidates else "the route has no replica"
        return Decision(None, policy, reason, _told(candidates, {}, None, avoid))
    scores = {c.replica.id: _score(policy, c) for c in fresh}
    rotated = fresh[turn % len(fresh) :] + fresh[: turn % len(fresh)]
    best = min(rotated, key=lambda c: scores[c.replica.id])
    reason = _reason(policy, best, fresh, scores)
    return Decision(best.replica, policy, reason, _told(candidates, scores, best, avoid))


def _score(policy: str, candidate: Candidate) -> float:
    """Lower is better. Connections count in shares of the engine's slots where it told how many it has."""
    if policy == ROUND_ROBIN:
        return 0.0
    slots = candidate.replica.max_num_seqs
    return round(candidate.in_flight / slots, 4) if slots else float(candidate.in_flight)


def _reason(policy: str, best: Candidate, among: Sequence[Candidate], scores: dict[str, float]) -> str:
    if len(among) == 1:
        return "the only replica that can take it"
    if policy == ROUND_ROBIN:
        return "its turn"
    mine = scores[best.replica.id]
    tied = sum(1 for score in scores.values() if score == mine)
    if tied > 1:
        return f"{best.in_flight} in flight, as few as {tied - 1} more; its turn among them"
    return f"{best.in_flight} in flight, the fewest for its slots"


def _told(
    candidates: Sequence[Candidate],
    scores: dict[str, float],
    best: Candidate | None,
    avoid: Collection[str],
) -> list[dict[str, Any]]:
    told = [_row(c, scores, c is best, c.replica.id in avoid) for c in candidates]
    told.sort(key=lambda row: row["verdict"] != "chosen")
    return told[:MAX_RECORDED]


def _row(candidate: Candidate, scores: dict[str, float], chosen: bool, failed: bool) -> dict[str, Any]:
    replica, load = candidate.replica, candidate.load
    row: dict[str, Any] = {
        "replica_id": replica.id,
        "name": replica.name,
        "device": replica.device,
        "in_flight": candidate.in_flight,
        "max_num_seqs": replica.max_num_seqs,
        "score": scores.get(replica.id),
        "verdict": _verdict(replica, scores, chosen, failed),
    }
    if load is not None:
        row |= {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "free_blocks": load.free_blocks,
        }
    return row


def _verdict(replica: Replica, scores: dict[str, float], chosen: bool, failed: bool) -> str:
    if chosen:
        return "chosen"
    if replica.state != "ready":
        return replica.state
    if failed and replica.id not in scores:
        return "just failed"
    return "not chosen"
