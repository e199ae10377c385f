"""What serving needs from outside, and what it hands back: structs and Protocols only.

The console implements these Protocols in `console/contract.py`; nothing here imports it. Every struct is immutable:
a gateway swaps a whole Snapshot, it never edits one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, MutableMapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

# ---------------------------------------------------------------------------------------------------------------
# ASGI, as far as it is used here

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]

# ---------------------------------------------------------------------------------------------------------------
# Configuration a gateway runs on


NANO = 10**9
"""Money is counted in whole nano-units (10^-9) of a tenant's currency: exact in 64 bits, and in Valkey's doubles up to
nine million units."""


class Budget(msgspec.Struct, frozen=True):
    """At most `amount` nano-units within a calendar window of the tenant's billing zone."""

    window: str  # "hour", "day", "month" or "total"
    amount: int


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one key or one tenant may use. None: no such limit. Rates hold in any 60 seconds, by Valkey's clock."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # input and output together
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrency: int | None = None  # requests admitted and not settled, waiting ones included
    budgets: tuple[Budget, ...] = ()


NO_LIMITS = Limits()


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a route's tokens cost, in micro-units of the currency per million tokens (10^-12 units per token)."""

    version: int
    currency: str
    input: int
    cached_input: int
    output: int


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who is calling: one API key of one tenant, or a tenant's playground."""

    key_id: str
    key_name: str
    tenant_id: str
    tenant_name: str
    source: str = "api"  # "api" or "playground"
    allowed_models: tuple[str, ...] | None = None  # None: every route
    expires_at: float | None = None  # seconds since the epoch
    revoked: bool = False
    limits: Limits = NO_LIMITS  # of the key
    tenant_limits: Limits = NO_LIMITS
    weight: int = 100  # the tenant's share of a queue, against other tenants' weights
    priority: str = "normal"  # "high", "normal" or "low": a class is served before those below it
    currency: str = "USD"
    billing_zone: str = "UTC"  # IANA name; where the tenant's hours, days and months begin
    may_override: bool = False  # may choose policy, target and replica by header
    capture_content: bool = False  # the tenant lets prompts and answers be kept


PRIORITIES = ("high", "normal", "low")


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One running copy of a model that can take requests, and how to reach it."""

    id: str
    name: str  # "smollm2-135m r1"
    deployment_id: str
    deployment_name: str
    state: str  # "ready" takes requests; "draining" finishes its own; others take none
    engine: str  # "embedded", "vllm", ...
    engine_version: str
    runtime: str
    device: str  # "cpu", "gpu-a a0"
    epoch: int  # launch epoch: a restarted replica is a new one to connection pools and breakers
    uds: str | None = None  # path of the worker's Unix socket
    url: str | None = None  # or its base URL (scheme, host, port, path before /v1), with api_key
    addresses: tuple[str, ...] = ()  # of that URL's host, pinned by the egress check; empty: resolve it
    api_key: str | None = None
    served_name: str = ""  # the model name that the engine knows
    extras: frozenset[str] | None = None  # fields beyond OpenAI's that its adapter lists as safe; None: all of them
    max_num_seqs: int = 0  # slots: sequences it runs at once, which all gateways together never exceed; 0: unbounded
    num_blocks: int = 0
    block_size: int = 0

    def __repr__(self) -> str:
        """Without its key: replicas stand in log lines and tracebacks."""
        return f"<Replica {self.name} {self.id} epoch {self.epoch}>"


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a deployment besides its replicas: whether it will have one, and when."""

    id: str
    name: str
    wakes: bool = False  # it was stopped because nobody asked: a request starts it
    between: bool = False  # its replicas are being replaced, or start again: the next one is on its way
    starting_at: float | None = None  # wall seconds since which its first replica has been starting
    start_s: float = 60.0  # how long a start takes, by earlier ones


class Target(msgspec.Struct, frozen=True):
    """One deployment behind a route. Weights are relative; a shadow gets copies of weight percent of the requests."""

    deployment_id: str
    weight: int = 100
    role: str = "stable"  # "stable", "canary" or "shadow"
    stands_in: bool = True  # may take more than its share where others cannot; False: quantised and not evaluated


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """What a route promises. None: nothing promised."""

    availability: float | None = None  # share of requests that end well, such as 0.99
    ttft_p99_ms: float | None = None
    itl_p99_ms: float | None = None
    jitter: float | None = None  # ITL p99 over p50


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A public model name and where its requests may go."""

    id: str
    name: str  # what callers put into "model"
    targets: tuple[Target, ...]
    created: int  # seconds since the epoch
    fallbacks: tuple[str, ...] = ()  # deployment ids, tried in order when no target can answer
    owned_by: str = "fanlight"
    policy: str = "least-connections"  # see serving.routing
    sticky: bool = True  # a key stays with one target while weights stay
    queue_timeout_s: float = 10.0
    max_queued: int = 1000  # requests waiting for one of its deployments
    max_queued_tokens: int = 4_000_000  # of prompts and answers asked for, waiting likewise
    max_attempts: int = 3
    hedge_after_s: float | None = None  # send a second copy when no first token came by then
    objectives: Objectives = Objectives()
    prices: Mapping[str, Price] = {}  # by currency
    max_model_len: int = 0  # tokens; 0: unknown
    max_prompt_tokens: int = 0  # tokens; 0: max_model_len - 1
    default_max_tokens: int | None = None
    deadline_s: float = 600.0  # for requests without streaming
    first_token_deadline_s: float = 120.0
    inter_token_deadline_s: float = 60.0
    on_stopped: str = "refuse"  # a request for a sleeping deployment: "refuse" tells when to come back, "hold" waits
    hold_s: float = 300.0
    max_held: int = 100  # requests that wait so in one gateway process


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The read-only configuration of a gateway. `version` grows with every change of a snapshot table."""

    version: int
    taken_at: float  # wall seconds at which it was last confirmed against the database
    keys: Mapping[str, Principal]  # by key digest (hex HMAC-SHA-256)
    playground: Mapping[str, Principal]  # by tenant id
    routes: Mapping[str, Route]  # by public name
    replicas: Mapping[str, Replica]  # by replica id
    deployments: Mapping[str, Deployment] = {}  # by deployment id


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own account of itself, as of `at` (wall seconds)."""

    at: float
    running: int
    waiting: int
    kv_usage: float  # 0..1
    free_blocks: int
    steps: int
    gpu_utilisation: float | None = None  # 0..1; None: it has no card, or cannot tell
    gpu_memory: float | None = None  # 0..1 of the card in use


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a gateway process is told once, at start."""

    journal_root: Path  # one directory per gateway process is made below it
    secret: bytes  # roots key digests, cache salts and end-user digests; see serving.apikey
    version: str
    instance: str  # "web-12345": names this process in records and logs
    max_body_bytes: int = 4 * 1024 * 1024
    max_in_flight: int = 2048
    snapshot_max_age_s: float = 900.0
    metrics_token: str | None = None
    trusted_proxies: tuple[str, ...] = ()
    siblings: Path | None = None  # where gateway processes of one host find each other's metrics
    valkey_url: str | None = None  # limits, queues and slots are shared there; None: this process is the only one
    min_free_disk_bytes: int = 1_000_000_000
    unsent_bytes_limit: int = 1_000_000
    drain_s: float = 30.0
    fault_delays: Mapping[str, float] = {}  # testing only: phase -> seconds slept in exactly that phase


# ---------------------------------------------------------------------------------------------------------------
# What a request leaves behind


class Outcome(StrEnum):
    """How a request ended. The billing rule of each stands in docs/metering.md."""

    OK = "ok"
    CANCELLED = "cancelled"  # the client left
    ERROR = "error"  # the engine or the way to it failed
    TIMEOUT = "timeout"  # a deadline of the route cut it
    REJECTED = "rejected"  # refused before any work: bad input, limits, no replica, or the engine's own 4xx or 503
    SLOW_READER = "slow_reader"  # the client did not read and its unsent bytes reached the bound
    GATEWAY_LOST = "gateway_lost"  # the gateway died; settled from its journal by the shipper


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable billable line for one authenticated request. `id` is the gateway's UUIDv7, never the client's."""

    id: str
    started_at: float  # wall seconds; the id's own millisecond stamp, so that (started_at, id) is one key
    tenant_id: str
    key_id: str
    model: str
    outcome: str
    prompt_tokens: int = 0
    cached_tokens: int = 0  # inside prompt_tokens
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # inside completion_tokens
    price_version: int | None = None  # fixed at admission; None: the route had no price in the tenant's currency
    currency: str = ""
    cost: int = 0  # nano-units of the currency
    requests: int = 1  # more: refusals of one key for one reason in one minute, and this the first of them


PHASES = (
    "receive",  # first byte to whole body
    "auth",  # key to Principal
    "admission",  # body checked, limits reserved
    "start",  # waiting for a deployment without a worker to be started
    "queue",  # waiting for a slot at the gateway
    "routing",  # choosing the replica
    "connect",  # request written until the engine has read it
    "tokenize",  # chat template and tokenizer in the engine
    "engine_queue",  # queued in the engine until first scheduled
    "prefill",  # first scheduled until the first token is sampled
    "decode",  # first token until the engine's last
    "engine",  # where an engine tells no phases: request written until its end; also each failed attempt
    "deliver",  # the engine's last token until the last byte is handed to the client
    "settle",  # after the last byte: usage and records made
)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One small telemetry row (scalars only, at most 400 bytes) for one Request. Times are microseconds."""

    id: str
    started_at: float
    tenant_id: str | None
    key_id: str | None
    source: str  # api, playground
    endpoint: str  # chat, completions, responses, messages, count_tokens, embeddings, tokenize, detokenize
    model: str
    stream: bool
    outcome: str
    status: int  # HTTP status sent to the client
    code: str = ""  # error.code, where there was an error
    finish_reason: str = ""
    deployment_id: str | None = None
    replica_id: str | None = None
    device: str = ""
    attempts: int = 0  # dispatches: 1 without a retry
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    duration_us: int = 0  # received to settled
    ttft_us: int | None = None  # received to first token handed to the client; None without streaming
    itl_p50_us: int | None = None
    itl_p99_us: int | None = None
    itl_max_us: int | None = None
    gateway_us: int = 0  # receive + auth + admission + routing + connect + deliver + settle
    queue_us: int = 0
    engine_queue_us: int = 0  # tokenize + engine_queue
    prefill_us: int = 0
    decode_us: int = 0
    unattributed_us: int = 0  # what no phase covers
    preemptions: int = 0
    role: str = ""  # of the target that it went to: stable, canary, shadow or fallback
    retries: int = 0  # how often the client had sent it before, as far as it told or was recognised
    currency: str = ""
    cost: int = 0  # nano-units
    requests: int = 1  # as in UsageRecord
    end_user: str = ""  # HMAC of the body's `user`, 16 hex digits
    client_request_id: str = ""  # the caller's own x-request-id, at most 64 characters
    trace_id: str = ""  # W3C, 32 hex digits
    gateway: str = ""
    gateway_version: str = ""
    snapshot_version: int = 0
    engine_version: str = ""


SUMMARISED = frozenset(
    ("stop", "logit_bias", "response_format", "tools", "tool_choice", "suffix", "structured_outputs")
)
"""Parameters whose values are the caller's content: a record keeps a number or a kind of them, never the value."""


class RequestDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Events and decisions of one Request, at most 4 KB. Times are microseconds since it was received.

    events: [source, name, t, args] with source "gateway" or "engine"; phases: [name, start, end, args];
    candidates: one dict per replica looked at {replica_id, name, device, in_flight, max_num_seqs, running, waiting,
    kv_usage, score, verdict}; gaps: inter-token gaps as the gateway saw them, in units of 100 microseconds.
    """

    id: str
    started_at: float
    events: Sequence[tuple[str, str, int, Mapping[str, Any]]] = ()
    phases: Sequence[tuple[str, int, int, Mapping[str, Any]]] = ()
    clock: str = ""  # see Timeline in serving.telemetry.timeline
    decision: Mapping[str, Any] = {}  # {policy, reason, at, took_us, replica_id}
    candidates: Sequence[Mapping[str, Any]] = ()
    gaps: Sequence[int] = ()
    gaps_dropped: int = 0
    params: Mapping[str, Any] = {}  # sampling as sent to the engine; never content
    attempts: Sequence[Mapping[str, Any]] = ()  # [{replica_id, error, t}] of the ones that failed
    span_id: str = ""  # W3C, of the request's own span; parent_span_id is the caller's, if it sent one
    parent_span_id: str = ""
    sampled: bool = True  # what the caller decided
    engine: Mapping[str, Any] = {}  # {cached_tokens, computed_tokens, block_size, preemptions, ...}
    error: str = ""  # the message the client got


class Said(msgspec.Struct, frozen=True):
    """One message of a prompt, or one part of an answer."""

    role: str  # of a message; "prompt" for plain text; of an answer "assistant", "reasoning" or "call"
    text: str
    cut: bool = False  # there was more


class RequestContent(msgspec.Struct, frozen=True, kw_only=True):
    """The words of one Request, redacted: only where its tenant chose to keep them. At most 32 KB each way."""

    id: str
    started_at: float
    tenant_id: str
    prompt: tuple[Said, ...] = ()
    answer: tuple[Said, ...] = ()
    left_out: int = 0  # messages of the prompt, older than those kept


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag="settled"):
    """What the finaliser writes to the journal: everything about one finished request."""

    usage: UsageRecord | None  # None: unauthenticated, only counted
    record: RequestRecord
    detail: RequestDetail
    content: RequestContent | None = None  # None: its tenant keeps none


# ---------------------------------------------------------------------------------------------------------------
# Protocols


class SnapshotSource(Protocol):
    """Keeps a Snapshot fresh. `current()` never blocks and never raises; the caller checks `taken_at`."""

    def current(self) -> Snapshot: ...


class LiveState(Protocol):
    """Live load of replicas as workers report it; None where nothing is known. Never blocks."""

    def load(self, replica_id: str) -> ReplicaLoad | None: ...


class RecordRefused(Exception):
    """A sink will never take this batch, because of a value in it. Nothing was written."""


class RecordSink(Protocol):
    """Where the shipper delivers. Idempotent by record id; raises when nothing was written.

    After RecordRefused it is called with parts of the batch, after anything else with the same batch again.
    """

    def write(self, batch: Sequence[Settled]) -> None: ...


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a streamed answer for a caller inside the process (the playground)."""

    kind: str  # "starting", "queued", "started", "delta", "done", "error"
    request_id: str
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float | None = None
    elapsed_ms: float = 0.0
    replica: str = ""
    position: int = 0  # in the queue, of `depth` that wait
    depth: int = 0
    eta_s: float = 0.0  # of a deployment that is being started
    status: int = 200
    code: str = ""
    message: str = ""


class Inference(Protocol):
    """The same pipeline that /v1 runs, for the playground's socket: same checks, limits, records.

    Closing the iterator (aclose) is a client that left: the engine is aborted and the request settled.
    """

    def chat(self, principal: Principal, body: Mapping[str, Any]) -> AsyncIterator[Delta]: ...
