"""Where a request goes. Pure: what is known goes in, a decision with its reasons comes out.

`pick_target` chooses the deployment, `rank` puts its replicas in order, the coordinator takes a slot of one of them,
and `decided` keeps what it was decided by for the record.
"""

from serving.routing.candidate import Candidate
from serving.routing.decision import Decision, choose, decided
from serving.routing.hints import NO_HINTS, POLICIES, Hints, permitted
from serving.routing.ranking import Ranked, Ranking, Turns, rank
from serving.routing.targets import TargetChoice, pick_target, takers

__all__ = [
    "NO_HINTS",
    "POLICIES",
    "Candidate",
    "Decision",
    "Hints",
    "Ranked",
    "Ranking",
    "TargetChoice",
    "Turns",
    "choose",
    "decided",
    "permitted",
    "pick_target",
    "rank",
    "takers",
]
