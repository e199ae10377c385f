"""Traces of the console's own pages over OTLP, where an endpoint is set. The request path of /v1 has no SDK in it."""

from __future__ import annotations


def instrument(endpoint: str) -> None:
    """Instrument Django and export to `endpoint` (for example http://collector:4318/v1/traces); no-op when empty."""
    if not endpoint:
        return
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.django import DjangoInstrumentor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from console.version import version

    provider = TracerProvider(
        resource=Resource.create({"service.name": "fanlight-console", "service.version": version()})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)
    DjangoInstrumentor().instrument()
