"""From an Authorization header to a Principal, in memory. A key is never kept, logged or echoed."""

from __future__ import annotations

import time

from serving import apikey
from serving.errors import Unauthenticated
from serving.port import Principal, Route, Snapshot


def bearer(authorization: str | None) -> str | None:
    """The token of a bearer header, or None."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def authenticate(authorization: str | None, snapshot: Snapshot, secret: bytes) -> Principal:
    """Find the caller; raises Unauthenticated saying what is wrong with the key, and never the key."""
    key = bearer(authorization)
    if key is None:
        raise Unauthenticated(
            "No API key was provided. Send it in an Authorization header: 'Authorization: Bearer YOUR_KEY'.",
            reason="missing",
        )
    if not apikey.is_well_formed(key):
        raise Unauthenticated("The API key is malformed. Check that it was copied whole.", reason="malformed")
    principal = snapshot.keys.get(apikey.digest(key, secret))
    if principal is None:
        raise Unauthenticated("The API key is not known here.", reason="unknown")
    check_valid(principal)
    return principal


def check_valid(principal: Principal) -> None:
    """Refuse a key that is known but no longer good."""
    if principal.revoked:
        raise Unauthenticated("The API key has been revoked.", reason="revoked")
    if principal.expires_at is not None and principal.expires_at <= time.time():
        raise Unauthenticated("The API key has expired.", reason="expired")


def may_use(principal: Principal, route: Route) -> bool:
    """Whether this key may call this route."""
    return principal.allowed_models is None or route.name in principal.allowed_models
