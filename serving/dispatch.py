"""What leaves for the engine, and what the journal must know before it does. Pure."""

from __future__ import annotations

import msgspec

from serving import apikey
from serving.errors import BadRequest
from serving.journal import Opened
from serving.port import GatewaySettings, Replica
from serving.request import Request
from serving.schemas import EXTRAS, Ask
from serving.telemetry import names

STREAM_OPTIONS = {"include_usage": True}
OUR_STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
_TIMELINE = f"{names.TIMELINE_HEADER}: 1\r\n".encode()


def check_extras(ask: Ask, replica: Replica) -> None:
    """Refuse a field that OpenAI does not document and this replica's engine does not take."""
    if replica.extras is None:
        return
    for name in sorted(EXTRAS.intersection(ask.upstream) - replica.extras):
        raise BadRequest(f"The engine of this model does not take `{name}`.", param=name, code="unknown_parameter")


def outgoing(request: Request, replica: Replica, secret: bytes, head: bytes, *, stream: bool) -> bytes:
    """The whole HTTP message: the channel's `head`, headers of ours, and a body with the identity no caller can set."""
    assert request.ask is not None
    # an engine may still be ending the attempt before this one, and ids are unique there
    request_id = f"{request.id}-{request.attempts + 1}" if request.attempts else request.id
    body = {**request.ask.upstream, "model": replica.served_name}
    external = replica.engine == "external"  # a stranger's endpoint refuses what OpenAI does not document
    if stream:
        body["stream"] = True
        body["stream_options"] = STREAM_OPTIONS if external else OUR_STREAM_OPTIONS
    if not external:
        body["request_id"] = request_id
        body["cache_salt"] = apikey.cache_salt(request.principal.tenant_id, secret)
    encoded = msgspec.json.encode(body)
    ours = b"x-request-id: %b\r\ntraceparent: %b\r\nContent-Length: %d\r\n" % (
        request_id.encode(),
        request.arrival.trace.header().encode(),
        len(encoded),
    )
    return b"".join((head, ours, b"" if external else _TIMELINE, b"\r\n", encoded))


def opened(request: Request, replica: Replica | None, settings: GatewaySettings) -> Opened:
    """All that is needed to bill the request if its gateway dies; no replica while it waits for one."""
    assert request.ask is not None and request.route is not None and request.slot is not None
    return Opened(
        id=request.id,
        slot=request.slot,
        started_at=request.arrival.started_at,
        tenant_id=request.principal.tenant_id,
        key_id=request.principal.key_id,
        source=request.principal.source,
        endpoint=request.endpoint,
        model=request.route.name,
        stream=request.ask.stream,
        prompt_estimate=request.ask.prompt_estimate,
        price=request.price,
        deployment_id=replica.deployment_id if replica else None,
        replica_id=replica.id if replica else None,
        device=replica.device if replica else "",
        end_user=request.end_user,
        client_request_id=request.arrival.client_request_id,
        trace_id=request.arrival.trace.trace_id,
        gateway=settings.instance,
        gateway_version=settings.version,
        snapshot_version=request.snapshot.version,
        engine_version=replica.engine_version if replica else "",
    )
