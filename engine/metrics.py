"""Prometheus metrics under vLLM's names, so that dashboards and routers need no second mapping."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core import EngineCore
from engine.sequence import Sequence
from engine.steps import StepRecord
from engine.types import FinishReason

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_ITL = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0),
)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class EngineMetrics:
    """Histograms, observed on the step thread. Implements `core.Observer`."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry(auto_describe=False)
        self._iteration = self._histogram("iteration_tokens_total", "Tokens per step", _TOKENS)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From the body's arrival to the first token", _SECONDS
        )
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens", _ITL)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for the first admission", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "From admission to the first token", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first to the last token", _SECONDS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From the body's arrival to the end", _SECONDS)
        self._last_token: dict[int, int] = {}
        self._ends: deque[float] = deque(maxlen=64)

    def watch(self, core: EngineCore) -> None:
        """Export the core's own counters and gauges too."""
        self.registry.register(_CoreCollector(core, self.model_name))

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)

    def finished_per_second(self) -> float:
        """Rate of ends over the last 64 of them; 0 while too few are known."""
        ends = tuple(self._ends)
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0

    def on_step(self, record: StepRecord) -> None:
        """See Observer."""
        self._iteration.observe(record.decode_tokens + record.prefill_tokens)

    def on_token(self, sequence: Sequence) -> None:
        """See Observer."""
        now = time.monotonic_ns()
        before = self._last_token.get(sequence.id)
        self._last_token[sequence.id] = now
        if before is not None:
            self._itl.observe((now - before) / 1e9)
        else:
            self._span(self._ttft, sequence, "RECEIVED", "FIRST_TOKEN")
            self._span(self._prefill, sequence, "SCHEDULED", "FIRST_TOKEN")

    def on_finish(self, sequence: Sequence) -> None:
        """See Observer."""
        self._last_token.pop(sequence.id, None)
        self._ends.append(time.monotonic())
        self._span(self._queue, sequence, "QUEUED", "SCHEDULED")
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._span(self._decode, sequence, "FIRST_TOKEN", "FINISHED")
            self._span(self._e2e, sequence, "RECEIVED", "FINISHED")

    def _span(self, histogram: Histogram, sequence: Sequence, first: str, last: str) -> None:
        start, end = sequence.timeline.at(first), sequence.timeline.at(last)
        if start is not None and end is not None:
            histogram.observe((end - start) / 1e9)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        parent = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return parent.labels(self.model_name)


class _CoreCollector(Collector):
    """Reads counters where they live, at scrape time."""

    def __init__(self, core: EngineCore, model_name: str) -> None:
        self._core = core
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        core, pool = self._core, self._core.scheduler.pool
        yield self._gauge("vllm:num_requests_running", "Sequences running", core.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences waiting", core.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1", pool.usage)
        yield self._gauge("fanlight:free_blocks", "KV blocks not in use", pool.num_free)
        yield self._gauge("fanlight:total_blocks", "KV blocks in all", pool.num_blocks)
        yield self._gauge("fanlight:usable_blocks", "KV blocks left after what is lent", pool.usable)
        yield self._gauge("fanlight:host_blocks", "Slots of the host cache", core.scheduler.host.num_slots)
        yield self._gauge("fanlight:host_blocks_used", "Slots that hold a block", core.scheduler.host.num_used)
        yield from self._counters()
        yield self._by("vllm:request_success", "Sequences ended, by reason", "finished_reason", self._ends())
        yield self._by("fanlight:preemptions", "Sequences preempted, by how", "kind", self._preemptions())
        yield self._by("fanlight:step_seconds", "Time of steps, by part", "part", dict(core.steps.seconds))
        yield self._cache_config()

    def _counters(self) -> Iterator[Metric]:
        counts = self._core.scheduler.counts
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up", counts.prefix_query_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found cached", counts.prefix_hit_tokens),
            ("fanlight:host_cache_hits", "Of these, prompt tokens found on the host", counts.host_hit_tokens),
            ("fanlight:swapped_out_blocks", "KV blocks copied to the host", counts.swapped_out_blocks),
            ("fanlight:swapped_in_blocks", "KV blocks copied from the host", counts.swapped_in_blocks),
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests", counts.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", counts.generation_tokens),
            ("vllm:num_preemptions", "Sequences preempted", counts.preemptions.total()),
        ):
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric(self._labels, value)
            yield family

    def _ends(self) -> dict[str, float]:
        finished = self._core.scheduler.counts.finished
        return {reason.value: finished[reason.value] for reason in FinishReason}

    def _preemptions(self) -> dict[str, float]:
        preemptions = self._core.scheduler.counts.preemptions
        return {kind: preemptions[kind] for kind in ("swap", "recompute")}

    def _by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, number in values.items():
            family.add_metric([*self._labels, value], number)
        return family

    def _cache_config(self) -> Metric:
        scheduler = self._core.scheduler
        facts = {
            "block_size": str(scheduler.pool.block_size),
            "num_gpu_blocks": str(scheduler.pool.num_blocks),
            "enable_prefix_caching": str(scheduler.limits.prefix_cache),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "KV cache settings", labels=["model_name", *facts])
        family.add_metric([*self._labels, *facts.values()], 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family
