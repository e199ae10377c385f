"""Sends requests' spans to a collector from beside the shipper: a collector that is away never holds up the ledger."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from console.telemetry.spans import spans, wanted
from console.version import version
from serving.port import RecordSink, Settled

log = logging.getLogger(__name__)

MAX_WAITING = 64  # batches; the oldest wait, newer ones are dropped and counted
TIMEOUT_S = 5
END = None


class ExportingSink:
    """A RecordSink that delivers to another one and, once that has them, tells a collector of some."""

    def __init__(self, sink: RecordSink, exporter: SpanExporter, share: float) -> None:
        self._sink = sink
        self._exporter = exporter
        self._share = share
        self._waiting: queue.Queue[list[Settled] | None] = queue.Queue(MAX_WAITING)
        self._resource = Resource.create({"service.name": "fanlight-gateway", "service.version": version()})
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="otlp-export", daemon=True)
        self._thread.start()

    def write(self, batch: Sequence[Settled]) -> None:
        """See RecordSink. A batch that is delivered twice is exported twice, under the same span ids."""
        self._sink.write(batch)
        chosen = [settled for settled in batch if wanted(settled, self._share)]
        if not chosen:
            return
        try:
            self._waiting.put_nowait(chosen)
        except queue.Full:
            self.dropped += len(chosen)

    def close(self) -> None:
        """Export what waits, for a few seconds at most."""
        try:
            self._waiting.put(END, timeout=TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(TIMEOUT_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        told_of = 0
        while (batch := self._waiting.get()) is not END:
            made = [span for settled in batch for span in spans(settled, self._resource)]
            try:
                failed = self._exporter.export(made) is not SpanExportResult.SUCCESS
            except Exception:
                log.exception("otlp: the exporter failed")
                failed = True
            self.dropped += len(batch) if failed else 0
            if self.dropped > told_of:
                log.warning("otlp: %d requests were not exported so far", self.dropped)
                told_of = self.dropped


def exporting(sink: RecordSink, endpoint: str, share: float) -> ExportingSink:
    """`sink` with an export to `endpoint`, for example http://collector:4318/v1/traces."""
    return ExportingSink(sink, OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S), share)
