"""The seam between the pipeline and what gateway processes share: claims go in, grants and refusals come out.

One Claim asks for everything that a request needs: its limits reserved, a place in the queue of its pool, a slot of a
replica. It is one decision, made in one call. A *pool* is a deployment: slots belong to replicas, so requests wait
where the slots are, and two routes over one deployment share it fairly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from serving.port import Limits


class Scope(msgspec.Struct, frozen=True):
    """Whose limits: a key's or a tenant's."""

    kind: str  # "key" or "tenant"
    id: str
    limits: Limits


class Slots(msgspec.Struct, frozen=True):
    """A replica that could take the request, and how many sequences it runs at once (0: unbounded)."""

    replica_id: str
    total: int


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for. Tokens and cost are upper bounds: what is admitted can only turn out cheaper."""

    id: str  # of the request
    scopes: tuple[Scope, ...]
    currency: str
    zone: str  # IANA name, for the windows of budgets
    input_tokens: int
    output_tokens: int
    cost: int  # nano-units
    # where it may run
    pool: str  # deployment id
    candidates: tuple[Slots, ...]  # best first
    least: bool = (
        False  # take the one with the smallest share of its slots in use (the order breaks ties), not the first
    )
    slots: int = 1  # sequences it runs at once
    # how it waits
    tenant_id: str
    weight: int = 100
    priority: int = 1  # index into port.PRIORITIES: 0 goes first
    max_queued: int = 1000
    max_queued_tokens: int = 4_000_000
    fingerprint: str = ""  # the same for every try of one client call; "" where retries are not recognised


class Allowance(msgspec.Struct, frozen=True):
    """What is left of one limit after this request, for the x-ratelimit-* headers."""

    limit: int
    remaining: int
    reset_s: float  # until all of it is there again


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """Admitted, and a replica's slots are taken in this process's name."""

    replica_id: str
    in_use: Mapping[str, int] = {}  # slots in use of each candidate, just before
    requests: Allowance | None = None  # the tightest limit of requests per minute
    tokens: Allowance | None = None  # and of tokens per minute
    retries: int = 0  # how often this fingerprint had been turned away by the queue before


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Admitted, and waiting in the pool's queue: `Coordinator.granted` tells when its turn has come."""

    position: int  # 1: next among its priority and tenant order
    depth: int  # requests waiting in the pool, this one included
    in_use: Mapping[str, int] = {}
    requests: Allowance | None = None
    tokens: Allowance | None = None
    retries: int = 0


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was reserved."""

    reason: str  # "limit" or "queue_full"
    retry_after_s: int  # whole seconds, 1 to 60
    retryable: bool = True  # False: waiting will not help (it never fits, or the budget is gone)
    # for "limit"
    scope: str = ""  # "key" or "tenant"
    limit: str = ""  # requests_per_minute, tokens_per_minute, ..., concurrency, budget_hour, budget_day, ...
    allowed: int = 0
    used: int = 0  # reserved and spent
    wanted: int = 0
    requests: Allowance | None = None
    tokens: Allowance | None = None
    # for "queue_full"
    depth: int = 0


class Used(msgspec.Struct, frozen=True):
    """What a request was billed in the end."""

    input_tokens: int
    output_tokens: int
    cost: int


class Place(msgspec.Struct, frozen=True):
    """Where a waiting request stands."""

    position: int
    depth: int


class QueueTimeout(Exception):
    """Its turn did not come in time; the place is given up. `retry_after_s` is sized to the drain estimate."""

    def __init__(self, retry_after_s: int, depth: int) -> None:
        super().__init__(f"no turn in time, {depth} waiting")
        self.retry_after_s = retry_after_s
        self.depth = depth


class Coordinator(Protocol):
    """Implemented over Valkey, and in memory for one process alone."""

    @property
    def alone(self) -> bool:
        """Whether Valkey is away, so that this process goes by its share of every limit."""

    @property
    def processes(self) -> int:
        """Gateway processes alive, this one included, as last known."""

    def in_use(self, replica_id: str) -> int:
        """Slots in use of a replica over all processes, as last heard (at most a second ago)."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Give back everything this process holds."""

    async def admit(self, claim: Claim) -> Granted | Waiting | Refused:
        """Decide about a request, in one round trip. A task cancelled meanwhile leaves nothing reserved."""

    async def granted(self, request_id: str, timeout_s: float) -> Granted:
        """The turn of a Waiting request. Raises QueueTimeout, after which it is settled as refused."""

    async def move(
        self, request_id: str, pool: str, candidates: tuple[Slots, ...], *, least: bool
    ) -> Granted | Waiting:
        """Give its slots back and take others, ahead of who waits, for another attempt. Limits stay reserved."""

    def settle(self, request_id: str, used: Used | None) -> None:
        """The request is over: correct what was reserved, free its slots or its place, wake who is next.

        None: it was turned away before any work, so that not even the request counts. Never waits; idempotent.
        """

    def place(self, request_id: str) -> Place | None:
        """Where a waiting request stands, as last heard; None where it does not wait."""

    def waiting(self, pool: str) -> int:
        """Requests waiting in a pool over all processes, as last heard."""

    def wake(self, deployment_id: str) -> None:
        """Have the controller start a deployment that has no worker. Never waits; while alone nobody hears it."""
