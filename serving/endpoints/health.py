"""/healthz: the process answers. /readyz: it should get traffic. /metrics: who may read them."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST

from serving import auth
from serving.errors import GatewayError, Unauthenticated
from serving.exchange import Exchange
from serving.pipeline import Pipeline
from serving.port import GatewaySettings

METRICS_TYPE = CONTENT_TYPE_LATEST.encode()


def unready(pipeline: Pipeline) -> list[str]:
    """Why no traffic should come here; empty when it may. Replicas are not asked: they are not this process."""
    reasons: list[str] = []
    try:
        pipeline.check_open()
    except GatewayError as error:
        reasons.append(error.code)
    if pipeline.journal.unwritten:
        reasons.append("journal_unwritable")
    return reasons


def check_may_read_metrics(exchange: Exchange, settings: GatewaySettings) -> None:
    """Free on loopback, else for the metrics token; raises Unauthenticated."""
    if _is_loopback(_origin(exchange, settings.trusted_proxies)):
        return
    token = auth.bearer(exchange.header(b"authorization")) or ""
    expected = settings.metrics_token
    if not expected or not hmac.compare_digest(token.encode(), expected.encode()):
        raise Unauthenticated("Metrics need the metrics token here.", reason="metrics", code="invalid_metrics_token")


def _origin(exchange: Exchange, trusted: Sequence[str]) -> str | None:
    """Where the request comes from; None where a proxy that is not trusted stands between."""
    forwarded = exchange.header(b"x-forwarded-for")
    if forwarded is None:
        return None if exchange.header(b"forwarded") else exchange.client
    if exchange.client not in trusted:
        return None
    hops = [hop.strip() for hop in forwarded.split(",")]
    while hops and hops[-1] in trusted:
        hops.pop()
    return hops[-1] if hops else exchange.client


def _is_loopback(address: str | None) -> bool:
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
