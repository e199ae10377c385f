"""A choice with everything that it was made by, as it goes into the record."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from serving.port import Replica
from serving.routing.candidate import Candidate
from serving.routing.ranking import Ranked, Ranking, rank
from serving.routing.targets import TargetChoice

MAX_RECORDED = 16


class Decision(msgspec.Struct, frozen=True):
    """Made once a slot was granted. The rows of its candidates are only written out when somebody asks for them."""

    replica: Replica | None
    policy: str
    reason: str
    role: str = ""  # of the target
    ranking: Ranking | None = None
    in_use: Mapping[str, int] = {}  # slots of each candidate just before, from who granted it

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """At most 16 rows, the chosen one first, then by rank, then the excluded ones with their verdicts."""
        if self.ranking is None:
            return []
        chosen = self.replica.id if self.replica else ""
        every = [*self.ranking.ranked, *self.ranking.excluded]
        every.sort(key=lambda each: each.replica.id != chosen)
        return [self._row(each, each.replica.id == chosen) for each in every[:MAX_RECORDED]]

    def _row(self, ranked: Ranked, chosen: bool) -> dict[str, Any]:
        candidate, replica = ranked.candidate, ranked.replica
        in_use = self.in_use.get(replica.id, candidate.busy)
        row: dict[str, Any] = {
            "replica_id": replica.id,
            "name": replica.name,
            "device": replica.device,
            "in_flight": candidate.in_flight,
            "in_use": in_use,
            "max_num_seqs": replica.max_num_seqs,
            "score": ranked.score,
            "verdict": "chosen" if chosen else _verdict(ranked, in_use),
        }
        if candidate.cached_tokens:
            row["cached_tokens"] = candidate.cached_tokens
        if candidate.load is not None:
            row |= {
                "running": candidate.load.running,
                "waiting": candidate.load.waiting,
                "kv_usage": candidate.load.kv_usage,
                "free_blocks": candidate.load.free_blocks,
            }
        return row


def decided(
    ranking: Ranking,
    replica_id: str | None,
    in_use: Mapping[str, int] | None = None,
    *,
    target: TargetChoice | None = None,
) -> Decision:
    """The decision once a replica of the ranking was granted; None: nobody could take it."""
    role, why = (target.role, target.reason) if target else ("", "")
    if replica_id is None:
        return Decision(None, ranking.policy, _joined(why, ranking.reason), role, ranking, in_use or {})
    place = next(n for n, each in enumerate(ranking.ranked) if each.replica.id == replica_id)
    reason = ranking.reason if place == 0 or ranking.least else _instead(ranking)
    return Decision(ranking.ranked[place].replica, ranking.policy, _joined(why, reason), role, ranking, in_use or {})


def choose(policy: str, candidates: Sequence[Candidate], *, turn: int, avoid: Collection[str] = ()) -> Decision:
    """Rank and take the first, where nobody grants slots."""
    ranking = rank(policy, candidates, turn=turn, avoid=avoid)
    return decided(ranking, ranking.ranked[0].replica.id if ranking.ranked else None)


def _joined(target: str, replica: str) -> str:
    return f"{target}; {replica}" if target else replica


def _instead(ranking: Ranking) -> str:
    """The grant went to a later one, because those before it were full at that moment."""
    return f"the first with a free slot, after {ranking.ranked[0].replica.name} ({ranking.reason})"


def _verdict(ranked: Ranked, in_use: int) -> str:
    if ranked.verdict:
        return ranked.verdict
    slots = ranked.replica.max_num_seqs
    return "no free slot" if slots and in_use >= slots else "not chosen"
