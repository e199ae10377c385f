"""What a caller wishes of routing, and how much of it is heard."""

from __future__ import annotations

import msgspec

from serving.errors import BadRequest
from serving.port import Principal

ROUND_ROBIN = "round-robin"
LEAST_CONNECTIONS = "least-connections"
LOAD_AWARE = "load-aware"
PREFIX_AWARE = "prefix-aware"
SESSION_AFFINITY = "session-affinity"
POLICIES = (ROUND_ROBIN, LEAST_CONNECTIONS, LOAD_AWARE, PREFIX_AWARE, SESSION_AFFINITY)


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wishes of routing. All but the session are for principals that may override."""

    policy: str = ""
    target: str = ""  # name or id of a deployment
    replica: str = ""  # name or id of a replica
    session: str = ""  # requests of one session stay together under session affinity
    retry: int = 0  # which try of the same call this is, as the client tells it


NO_HINTS = Hints()


def permitted(hints: Hints, principal: Principal) -> Hints:
    """The hints that count for this principal. Raises BadRequest for a policy that there is not, where it counts."""
    if not (hints.policy or hints.target or hints.replica):
        return hints
    if not principal.may_override:
        return Hints(session=hints.session, retry=hints.retry)
    if hints.policy and hints.policy not in POLICIES:
        raise BadRequest(
            f"There is no policy {hints.policy!r}; send one of {', '.join(POLICIES)}.", code="invalid_value"
        )
    return hints
