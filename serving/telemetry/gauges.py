"""What a gateway process is like at this moment, for whoever scrapes it."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator

from serving.coordination.contract import Coordinator
from serving.pipeline import Pipeline
from serving.port import GatewaySettings, Snapshot
from serving.replicas import ReplicaPool
from serving.shipper import unshipped_bytes
from serving.snapshot import Configuration
from serving.telemetry import names
from serving.telemetry.metrics import GaugeRow


def rows(
    settings: GatewaySettings,
    configuration: Configuration,
    pool: ReplicaPool,
    coordinator: Coordinator,
    pipeline: Pipeline | None,
) -> Iterator[GaugeRow]:
    """Name, help, labels and value of each gauge; without a pipeline only what does not need one."""
    yield from _configuration(settings, configuration)
    yield from _upstream(pool)
    if pipeline is not None:
        yield from _coordination(configuration.peek(), coordinator)
        yield from _health(pipeline)
        yield from _journal(pipeline)


def _configuration(settings: GatewaySettings, configuration: Configuration) -> Iterator[GaugeRow]:
    snapshot = configuration.peek()
    build = {"version": settings.version, "python": platform.python_version()}
    yield names.BUILD_INFO, "Version of the gateway", build, 1
    yield names.SNAPSHOT_VERSION, "Version of the configuration", {}, snapshot.version
    age = configuration.age_s(snapshot)
    yield names.SNAPSHOT_AGE, "Since the configuration was last confirmed", {}, age


def _upstream(pool: ReplicaPool) -> Iterator[GaugeRow]:
    for channel in pool.channels():
        labels = {"replica": channel.replica.id}
        yield names.UPSTREAM_CONNECTIONS, "Open, in use or idle", labels, channel.connections
        yield names.UPSTREAM_IN_FLIGHT, "Requests on this replica", labels, channel.in_flight
        yield names.UPSTREAM_AGE, "Age of the oldest open connection", labels, channel.oldest_s()


def _coordination(snapshot: Snapshot, coordinator: Coordinator) -> Iterator[GaugeRow]:
    yield names.ALONE, "1 while Valkey is away and limits are this process's share", {}, int(coordinator.alone)
    yield names.PROCESSES, "Gateway processes alive, as last known", {}, coordinator.processes
    for deployment_id in sorted({replica.deployment_id for replica in snapshot.replicas.values()}):
        waiting = coordinator.waiting(deployment_id)
        yield names.WAITING, "Requests waiting for a slot", {"deployment": deployment_id}, waiting
    for replica in snapshot.replicas.values():
        in_use = coordinator.in_use(replica.id)
        yield names.SLOTS, "Slots in use over all processes", {"replica": replica.id}, in_use


def _health(pipeline: Pipeline) -> Iterator[GaugeRow]:
    states = pipeline.router.health.states(time.monotonic())
    for replica_id in pipeline.configuration.peek().replicas:
        labels = {"replica": replica_id, "reason": states.get(replica_id, "")}
        yield names.UNHEALTHY, "1 for each replica that is not asked, and why", labels, int(replica_id in states)


def _journal(pipeline: Pipeline) -> Iterator[GaugeRow]:
    journal = pipeline.journal
    yield names.IN_FLIGHT, "Requests being served", {}, len(pipeline.in_flight)
    yield names.JOURNAL_BYTES, "Size of the journal on disk", {}, journal.bytes_on_disk()
    yield names.JOURNAL_UNSHIPPED, "Not delivered yet", {}, unshipped_bytes(journal.directory)
    yield names.JOURNAL_PENDING, "Records that the disk refused so far", {}, journal.unwritten
    yield names.JOURNAL_DROPPED, "Refusals that a full disk left no room for", {}, journal.dropped
