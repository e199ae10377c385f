"""Live numbers of replicas, as the controller last heard them from the workers: in Valkey, gone after ten seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import redis
from django.conf import settings

PREFIX = "fanlight:live:"
TTL_S = 10


def client() -> redis.Redis:
    """A synchronous client of the embedded or external Valkey."""
    return redis.Redis.from_url(settings.VALKEY_URL, socket_timeout=1.0, socket_connect_timeout=1.0)


def publish(valkey: redis.Redis, replica_id: str, stats: dict[str, Any]) -> None:
    """Keep a worker's /stats (plus `at`, wall seconds) for whoever shows or routes by it."""
    valkey.set(PREFIX + replica_id, msgspec.json.encode(stats), ex=TTL_S)


def read(replica_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The last known stats by replica id; a replica that is silent, or everything when Valkey is away, is missing."""
    ids = list(replica_ids)
    if not ids:
        return {}
    try:
        with client() as valkey:
            values = valkey.mget([PREFIX + replica_id for replica_id in ids])
    except redis.RedisError:
        return {}
    return {replica_id: msgspec.json.decode(value) for replica_id, value in zip(ids, values, strict=True) if value}
