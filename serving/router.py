"""Where requests go now: routing's pure functions, fed with what this process knows of targets, load and health."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence

import msgspec

from serving import routing
from serving.coordination.contract import Coordinator
from serving.errors import GatewayError
from serving.health import Health, outcome_of
from serving.port import LiveState, Replica
from serving.prefixes import PrefixIndex
from serving.replicas import ReplicaPool
from serving.request import Request
from serving.routing import Candidate, Ranking, TargetChoice
from serving.routing.hints import PREFIX_AWARE
from serving.schemas import Ask
from serving.snapshot import Configuration

log = logging.getLogger(__name__)


class Plan(msgspec.Struct, frozen=True):
    """A target and its replicas in order; whose slot is free is for the coordinator to say."""

    choice: TargetChoice
    ranking: Ranking
    replicas: Mapping[str, Replica]

    @property
    def pool(self) -> str:
        return self.choice.deployment_id or ""


class Router:
    """Plans a request's way, and learns from how it went."""

    def __init__(
        self, configuration: Configuration, live: LiveState, pool: ReplicaPool, coordinator: Coordinator
    ) -> None:
        self.health = Health()
        self.prefixes = PrefixIndex()
        self._configuration = configuration
        self._live = live
        self._pool = pool
        self._coordinator = coordinator
        self._turns = routing.Turns()

    def plan(self, request: Request, avoid: Sequence[str] = ()) -> Plan:
        """Choose target and order for a request; the newest Snapshot counts, also for a second attempt.

        Replicas in `avoid` and those that failed it are taken only where there is no other.
        """
        assert request.route is not None and request.ask is not None
        route, now = request.route, time.monotonic()
        replicas = self._configuration.replicas(self._configuration.peek(), route)
        avoid = [*avoid, *(attempt.replica_id for attempt in request.failed)]
        verdicts = {each.id: self.health.verdict(each, now) for each in replicas}
        ready = routing.takers(replicas, lambda each: verdicts[each.id], avoid)
        hints = request.hints
        draw = random.random()  # noqa: S311 - no secret
        choice = routing.pick_target(route, ready, request.principal.key_id, hints, draw)
        policy = hints.policy or route.policy
        pool = choice.deployment_id
        expected = self._expected(policy, request)
        candidates = [
            Candidate(
                each,
                in_flight=self._pool.in_flight(each.id),
                load=self._live.load(each.id),
                in_use=self._coordinator.in_use(each.id),
                cached_tokens=expected.get(each.id, 0),
                verdict=verdicts[each.id] or ("" if pool is not None else "not among those that may take it"),
            )
            for each in replicas
            if pool is None or each.deployment_id == pool
        ]
        ranking = routing.rank(
            policy,
            candidates,
            turn=0 if avoid else self._turns.next(pool or route.id),  # a second try takes nobody's turn
            now=time.time(),
            affinity=hints.session or request.principal.key_id,
            avoid=avoid,
            only=choice.replica_id,
        )
        return Plan(choice, ranking, {each.id: each for each in replicas})

    def sent(self, request: Request, replica: Replica) -> None:
        """A prompt goes there: its prefix will be in that replica's cache."""
        self.health.begin(replica, time.monotonic())
        if self._policy(request) == PREFIX_AWARE and request.ask is not None:
            self.prefixes.note(replica.id, request.principal.tenant_id, prompt_text(request.ask))

    def went(self, replica: Replica, error: GatewayError | None, latency_s: float | None) -> None:
        """How an attempt ended, for the health of its replica; `latency_s` to its first token."""
        outcome, jitter = outcome_of(error), random.random()  # noqa: S311 - no secret
        for event in self.health.note(replica, outcome, latency_s, time.monotonic(), jitter):
            log.warning("replica %s %s: %s", replica.name, event.what, event.reason)

    def prune(self, replicas: Mapping[str, Replica]) -> None:
        """Forget what is gone."""
        self.health.prune(replicas)
        self.prefixes.prune({each.id: each.epoch for each in replicas.values()})
        self._turns.prune({each.deployment_id for each in replicas.values()})

    def _policy(self, request: Request) -> str:
        assert request.route is not None
        return request.hints.policy or request.route.policy

    def _expected(self, policy: str, request: Request) -> Mapping[str, int]:
        if policy != PREFIX_AWARE or request.ask is None:
            return {}
        return self.prefixes.expected(request.principal.tenant_id, prompt_text(request.ask))


def prompt_text(ask: Ask) -> str:
    """What a prompt begins with, as far as its prefix matters: the order and words of its messages."""
    messages = ask.upstream.get("messages")
    told = messages if messages is not None else ask.upstream.get("prompt", "")
    return told if isinstance(told, str) else msgspec.json.encode(told).decode()
