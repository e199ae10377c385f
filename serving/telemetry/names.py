"""Every name that leaves the gateway as telemetry: headers and metrics. Change them here only."""

from __future__ import annotations

REQUEST_ID = b"x-request-id"
TRACEPARENT = b"traceparent"
RETRY_COUNT = b"x-stainless-retry-count"  # OpenAI's and Anthropic's own clients send it
POLICY = b"x-fanlight-policy"
TARGET = b"x-fanlight-target"
REPLICA = b"x-fanlight-replica"
SESSION = b"x-fanlight-session"
TIMELINE_HEADER = "x-fanlight-timeline"

OPENAI_VERSION = b"2020-10-01"

REQUESTS = "fanlight_requests"
DURATION = "fanlight_request_duration_seconds"
TTFT = "fanlight_time_to_first_token_seconds"
ITL = "fanlight_inter_token_latency_seconds"
QUEUE = "fanlight_queue_seconds"
GATEWAY = "fanlight_gateway_seconds"
TOKENS = "fanlight_tokens"
RETRIES = "fanlight_retries"
HEDGES = "fanlight_hedges"
UNAUTHENTICATED = "fanlight_unauthenticated"
IN_FLIGHT = "fanlight_in_flight"
UPSTREAM_CONNECTIONS = "fanlight_upstream_connections"
UPSTREAM_IN_FLIGHT = "fanlight_upstream_in_flight"
UPSTREAM_AGE = "fanlight_upstream_oldest_connection_seconds"
ALONE = "fanlight_coordination_alone"
PROCESSES = "fanlight_gateway_processes"
WAITING = "fanlight_waiting"
SLOTS = "fanlight_slots_in_use"
UNHEALTHY = "fanlight_replica_unhealthy"
JOURNAL_BYTES = "fanlight_journal_bytes"
JOURNAL_UNSHIPPED = "fanlight_journal_unshipped_bytes"
JOURNAL_PENDING = "fanlight_journal_unwritten_records"
JOURNAL_DROPPED = "fanlight_journal_dropped_records"
SNAPSHOT_AGE = "fanlight_snapshot_age_seconds"
SNAPSHOT_VERSION = "fanlight_snapshot_version"
BUILD_INFO = "fanlight_build_info"

METRICS = (
    REQUESTS,
    DURATION,
    TTFT,
    ITL,
    QUEUE,
    GATEWAY,
    TOKENS,
    RETRIES,
    HEDGES,
    UNAUTHENTICATED,
    IN_FLIGHT,
    UPSTREAM_CONNECTIONS,
    UPSTREAM_IN_FLIGHT,
    UPSTREAM_AGE,
    ALONE,
    PROCESSES,
    WAITING,
    SLOTS,
    UNHEALTHY,
    JOURNAL_BYTES,
    JOURNAL_UNSHIPPED,
    JOURNAL_PENDING,
    JOURNAL_DROPPED,
    SNAPSHOT_AGE,
    SNAPSHOT_VERSION,
    BUILD_INFO,
)
