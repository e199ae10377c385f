"""Prometheus metrics of one gateway process, on a registry of their own.

Labels name models, routes, deployments, replicas, outcomes and reasons; never a tenant, a key or anything a caller can
make up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.port import Settled
from serving.telemetry import names

Labels = tuple[str, ...]
GaugeRow = tuple[str, str, dict[str, str], float]  # name, help, labels, value

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_UNKNOWN = "unknown"


class Histogram(Collector):
    """Observed from the event loop only: no lock, and many values at once cost a bisection each."""

    def __init__(self, name: str, documentation: str, labels: Labels, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._bounds = bounds
        self._series: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, labels: Labels, values: Iterable[float]) -> None:
        counts = self._series.get(labels)
        if counts is None:
            counts = self._series[labels] = [0] * (len(self._bounds) + 1)
            self._sums[labels] = 0.0
        total = 0.0
        for value in values:
            counts[bisect_left(self._bounds, value)] += 1
            total += value
        self._sums[labels] += total

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, counts in self._series.items():
            buckets, running = [], 0
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                running += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), running))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family


class Gauges(Collector):
    """Values that are looked up when somebody asks."""

    def __init__(self, rows: Callable[[], Iterable[GaugeRow]]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, documentation, labels, value in self._rows():
            family = families.get(name)
            if family is None:
                family = GaugeMetricFamily(name, documentation, labels=list(labels))
                families[name] = family
            family.add_metric(list(labels.values()), value)
        yield from families.values()


class Metrics:
    """Everything that is counted, and the text that Prometheus scrapes."""

    def __init__(self, gauges: Callable[[], Iterable[GaugeRow]]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        where = ("model", "deployment", "replica")
        self._requests = self._counter(
            names.REQUESTS,
            "Authenticated requests by how they ended",
            (*where, "outcome", "reason"),
        )
        self._tokens = self._counter(names.TOKENS, "Billed tokens; cached ones are inside prompt", ("model", "kind"))
        self._retries = self._counter(
            names.RETRIES, "Attempts that failed before the first byte", ("replica", "reason")
        )
        self._hedges = self._counter(names.HEDGES, "Second copies sent because the first token was late", ("replica",))
        self._unauthenticated = self._counter(names.UNAUTHENTICATED, "Requests without a valid key", ("reason",))
        self._duration = self._histogram(names.DURATION, "Received to settled", where, _SECONDS)
        self._ttft = self._histogram(names.TTFT, "Received to first token sent", where, _SECONDS)
        self._itl = self._histogram(names.ITL, "Between chunks with text", where, _SHORT)
        self._queue = self._histogram(names.QUEUE, "In queues, ours and the engine's", where, _SECONDS)
        self._gateway = self._histogram(names.GATEWAY, "In the gateway itself", where, _SHORT)
        self.registry.register(Gauges(gauges))
        self._children: dict[Labels, Counter] = {}

    def settled(self, entry: Settled, gaps: Iterable[int], gap_unit_s: float) -> None:
        """Count one finished request."""
        record = entry.record
        routed = record.deployment_id is not None
        where = (
            record.model if routed else _UNKNOWN,
            record.deployment_id or "",
            record.replica_id or "",
        )
        self._child(self._requests, (*where, record.outcome, record.code)).inc()
        self._duration.observe(where, (record.duration_us / 1e6,))
        if not routed:
            return
        for kind, count in (
            ("prompt", record.prompt_tokens),
            ("cached", record.cached_tokens),
            ("completion", record.completion_tokens),
        ):
            if count:
                self._child(self._tokens, (where[0], kind)).inc(count)
        if record.ttft_us is not None:
            self._ttft.observe(where, (record.ttft_us / 1e6,))
        self._queue.observe(where, ((record.queue_us + record.engine_queue_us) / 1e6,))
        self._gateway.observe(where, (record.gateway_us / 1e6,))
        self._itl.observe(where, (gap * gap_unit_s for gap in gaps))

    def retried(self, replica_id: str, reason: str) -> None:
        self._child(self._retries, (replica_id, reason)).inc()

    def hedged(self, replica_id: str) -> None:
        self._child(self._hedges, (replica_id,)).inc()

    def unauthenticated(self, reason: str) -> None:
        self._child(self._unauthenticated, (reason,)).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _child(self, counter: Counter, labels: Labels) -> Counter:
        """labels() takes a lock and hashes; a handful of combinations is all there is."""
        key = (counter._name, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = counter.labels(*labels)
        return child

    def _counter(self, name: str, documentation: str, labels: Labels) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, labels: Labels, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, documentation, labels, bounds)
        self.registry.register(histogram)
        return histogram
