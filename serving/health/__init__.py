"""Which replicas may be asked, judged by how they answered. The clock (monotonic seconds) and chance are passed in."""

from serving.health.breaker import Breaker, State
from serving.health.budget import RetryBudget
from serving.health.outcome import FAULT, NEUTRAL, OK, outcome_of
from serving.health.watch import Event, Health

__all__ = ["FAULT", "NEUTRAL", "OK", "Breaker", "Event", "Health", "RetryBudget", "State", "outcome_of"]
