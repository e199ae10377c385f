"""A small world for the console's tests: people, tenants, keys, a fleet, and requests as the shipper delivers them."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, connections

from console.audit.actions import Actor
from console.base.models import User
from console.catalog.models import Model
from console.dashboards import overview
from console.fleet.actions import deploy, ensure_replicas, move_replica
from console.fleet.models import Deployment, Replica
from console.keys.actions import create_key, ensure_playground_key
from console.keys.models import APIKey
from console.telemetry import partitions
from console.telemetry import views as telemetry_views
from console.telemetry.sink import DatabaseSink
from console.tenants.models import Membership, Tenant
from serving.port import RequestDetail, RequestRecord, Settled, UsageRecord

PASSWORD = "a long enough passphrase"
_counter = itertools.count()


@dataclass
class World:
    """`aurora` is the tenant under test, `borealis` somebody else's."""

    admin: User
    owner: User
    member: User
    viewer: User
    stranger: User  # owns borealis
    nobody: User  # belongs nowhere
    aurora: Tenant
    borealis: Tenant
    key: APIKey
    foreign_key: APIKey
    replica: Replica
    deployment: Deployment
    secrets: list[str] = field(default_factory=list)


def forget() -> None:
    """Nothing that an earlier test read is still kept."""
    overview.kept.clear()
    telemetry_views.kept.clear()


def uuid7(at: float) -> str:
    """A UUIDv7 of that millisecond, larger than any made before it in the same one."""
    n = next(_counter)
    value = (int(at * 1000) << 80) | (0x7 << 76) | ((n >> 50 & 0xFFF) << 64) | (0b10 << 62) | (n & ((1 << 62) - 1))
    return str(uuid.UUID(int=value))


def settled(
    tenant: Tenant | None,
    key: APIKey | None,
    replica: Replica | None = None,
    *,
    age: float = 1.0,
    body: dict[str, Any] | None = None,
    **changes: Any,
) -> Settled:
    """One finished request, as the gateway would tell it: a stream of twelve tokens with every phase."""
    at = int((time.time() - age) * 1000) / 1000
    made = uuid7(at)
    same = {"id": made, "started_at": at}
    owner = {"tenant_id": str(tenant.id) if tenant else None, "key_id": str(key.id) if key else None}
    fields: dict[str, Any] = {
        "source": "api", "endpoint": "chat", "model": "smollm2", "stream": True, "outcome": "ok", "status": 200,
        "finish_reason": "stop", "attempts": 1, "prompt_tokens": 64, "cached_tokens": 32, "completion_tokens": 12,
        "duration_us": 520_000, "ttft_us": 212_000, "itl_p50_us": 25_000, "itl_p99_us": 60_000, "itl_max_us": 60_000,
        "gateway_us": 3_000, "queue_us": 0, "engine_queue_us": 9_000, "prefill_us": 198_000, "decode_us": 309_000,
        "unattributed_us": 1_000, "gateway": "web-1", "gateway_version": "0.1.0", "engine_version": "embedded 0.1.0",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
    }  # fmt: skip
    if replica is not None:
        fields |= {"replica_id": str(replica.id), "deployment_id": str(replica.deployment_id), "device": replica.device}
    fields |= changes
    detail = {
        "events": [
            ("gateway", "RECEIVED", 0, {}), ("engine", "QUEUED", 2_500, {"waiting": 1}),
            ("engine", "SCHEDULED", 11_500, {"cached_tokens": 32}), ("engine", "FIRST_TOKEN", 209_500, {}),
            ("engine", "FINISHED", 518_500, {"reason": "stop"}), ("gateway", "SETTLED", 520_000, {}),
        ],
        "phases": [
            ("auth", 0, 40, {}), ("receive", 40, 300, {}), ("admission", 300, 700, {}), ("routing", 700, 800, {}),
            ("connect", 800, 2_000, {}), ("tokenize", 2_000, 2_500, {}), ("engine_queue", 2_500, 11_500, {}),
            ("prefill", 11_500, 209_500, {"parts": [[11_500, 20], [110_000, 12]]}),
            ("decode", 209_500, 518_500, {}), ("deliver", 518_500, 519_000, {}), ("settle", 519_000, 520_000, {}),
        ],
        "clock": "shared",
        "decision": {"policy": "least-connections", "reason": "the only replica that can take it", "at": 800, "took_us": 90},  # noqa: E501
        "candidates": [{"replica_id": str(uuid.uuid4()), "name": "smollm2 r1", "device": "cpu", "in_flight": 1, "max_num_seqs": 16, "running": 1, "waiting": 0, "kv_usage": 0.25, "score": 0.0625, "verdict": "chosen"}],  # noqa: E501
        "gaps": [250] * 10 + [600],
        "params": {"stream": True, "temperature": 0.5},
        "engine": {"cached_tokens": 32, "computed_tokens": 32, "block_size": 16},
    }  # fmt: skip
    usage = UsageRecord(
        **same, tenant_id=owner["tenant_id"], key_id=owner["key_id"], model=fields["model"], outcome=fields["outcome"],
        prompt_tokens=fields["prompt_tokens"], cached_tokens=fields["cached_tokens"], completion_tokens=fields["completion_tokens"],  # noqa: E501
    ) if tenant else None  # fmt: skip
    return Settled(
        usage=usage,
        record=RequestRecord(**same, **owner, **fields),
        detail=RequestDetail(**same, **(detail if body is None else body)),
    )


def deliver(*batch: Settled) -> list[str]:
    """Write requests as the shipper does; their ids."""
    DatabaseSink().write(batch)
    forget()
    return [s.record.id for s in batch]


def build() -> World:
    """Everything but requests."""
    Path(settings.STATIC_ROOT).mkdir(exist_ok=True)  # WhiteNoise warns where there is none
    partitions.ensure(days_back=2)
    forget()

    def person(name: str, **more: Any) -> User:
        return User.objects.create_user(username=name, password=PASSWORD, **more)

    admin = person("admin", is_staff=True, is_superuser=True)
    owner, member, viewer, stranger, nobody = map(person, ("olga", "mario", "vera", "sten", "nemo"))
    aurora = Tenant.objects.create(name="aurora", display_name="Aurora Support")
    borealis = Tenant.objects.create(name="borealis", display_name="Borealis Secret")
    for tenant, user, role in (
        (aurora, owner, "owner"),
        (aurora, member, "member"),
        (aurora, viewer, "viewer"),
        (borealis, stranger, "owner"),
    ):
        Membership.objects.create(tenant=tenant, user=user, role=role)
    actor = Actor(user=admin, address="192.0.2.1")
    key, secret = create_key(actor, aurora, "helpdesk-prod")
    foreign, foreign_secret = create_key(actor, borealis, "borealis-key")
    ensure_playground_key(aurora)
    model = Model.objects.create(
        name="smollm2-135m-instruct", source="file:/models/secret-path/smollm2.gguf", format="gguf", architecture="LlamaForCausalLM",  # noqa: E501
        parameters=134_515_008, layers=30, hidden_size=576, heads=9, kv_heads=3, head_dim=64, context_length=8192,
        quantisation="Q4_1", disk_bytes=98_000_000, licence="Apache-2.0", state="ready", intermediate_size=1536,
        vocab_size=49_152, weights_bytes=96_000_000, weights_by_type={"Q4_1": 66_000_000, "Q8_0": 30_000_000},
    )  # fmt: skip
    deployment = deploy(actor, model, "smollm2", "smollm2")
    replica = ensure_replicas(deployment)[0]
    move_replica(
        replica,
        Replica.State.READY,
        "a real generation of 8 tokens took 0.2 s",
        pid=4242,
        uds="/run/secret-path/w.sock",
    )
    return World(
        admin,
        owner,
        member,
        viewer,
        stranger,
        nobody,
        aurora,
        borealis,
        key,
        foreign,
        replica,
        deployment,
        [secret, foreign_secret],
    )


def scrub() -> None:
    """After a test with real transactions: what `flush` does not know of."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE telemetry_requestrecord, telemetry_requestdetail, telemetry_enginespan")
        cursor.execute("INSERT INTO base_snapshotversion (id, version) VALUES (1, 1) ON CONFLICT DO NOTHING")
    forget()


@pytest.fixture
def world(db: None) -> World:
    """The world inside the test's transaction."""
    return build()


@pytest.fixture
def shared_world(transactional_db: None) -> Iterator[World]:
    """The world for tests whose threads have connections of their own."""
    kept = connections.settings["default"]["CONN_MAX_AGE"]
    connections.settings["default"]["CONN_MAX_AGE"] = 0  # threads of a test server end; their connections must, too
    scrub()
    yield build()
    scrub()
    connections.settings["default"]["CONN_MAX_AGE"] = kept
