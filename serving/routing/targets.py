"""Which deployment of a route takes a request: by share, by wish, or as a fallback; and who gets a copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from serving.port import Replica, Route, Target
from serving.routing import rendezvous
from serving.routing.hints import Hints

STABLE, CANARY, SHADOW, FALLBACK = "stable", "canary", "shadow", "fallback"


class TargetChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment, or why there is none."""

    deployment_id: str | None
    role: str = ""  # stable, canary, fallback, or shadow where somebody asked for one
    reason: str = ""
    replica_id: str = ""  # the only replica that may take it, where the caller named one
    shadows: tuple[str, ...] = ()  # deployments that get a copy


def takers(
    replicas: Iterable[Replica], verdict: Callable[[Replica], str], avoid: Collection[str] = ()
) -> dict[str, list[Replica]]:
    """Replicas that can take a request now, by deployment.

    `verdict` is health's; `avoid` names replicas that have just failed this request: they count again
    where nothing else is left.
    """
    able = [each for each in replicas if each.state == "ready" and not verdict(each)]
    fresh = [each for each in able if each.id not in avoid] or able
    grouped: dict[str, list[Replica]] = {}
    for each in fresh:
        grouped.setdefault(each.deployment_id, []).append(each)
    return grouped


def pick_target(
    route: Route, ready: Mapping[str, Sequence[Replica]], key_id: str, hints: Hints, draw: float
) -> TargetChoice:
    """Choose for one request; `ready` is from `takers`, `hints` from `permitted`, `draw` uniform in [0, 1).

    A sticky route goes by the key, any other by the draw. Copies go by the draw, independent of the choice.
    Targets that may not stand in for others take nothing while those that should take the rest cannot.
    """
    if hints.replica or hints.target:
        return _wished(route, ready, hints)
    sharing = [each for each in route.targets if each.role != SHADOW and each.weight > 0]
    able = [each for each in sharing if ready.get(each.deployment_id)]
    if len(able) < len(sharing) and not any(each.stands_in for each in able):
        able = []
    if not able:
        return _fallback(route, ready, bool(sharing))
    chosen = able[0] if len(able) == 1 else _split(able, key_id if route.sticky else None, draw)
    return TargetChoice(
        deployment_id=chosen.deployment_id,
        role=chosen.role,
        reason=_why(chosen, able, len(sharing), route.sticky),
        shadows=_shadows(route, ready, chosen.deployment_id, draw),
    )


def _split(able: Sequence[Target], key_id: str | None, draw: float) -> Target:
    if key_id is not None:
        return min(able, key=lambda each: rendezvous.distance(key_id, each.deployment_id, each.weight))
    ordered = sorted(able, key=lambda each: each.deployment_id)
    point = draw * sum(each.weight for each in ordered)
    for each in ordered:
        point -= each.weight
        if point < 0:
            return each
    return ordered[-1]  # only by rounding


def _why(chosen: Target, able: Sequence[Target], sharing: int, sticky: bool) -> str:
    if sharing == 1:
        return ""  # nothing was chosen
    if len(able) == 1:
        return "the only target with a replica that can take it"
    total = sum(each.weight for each in able)
    return f"{'the key is' if sticky else 'drawn'} in its share, {chosen.weight} of {total}"


def _fallback(route: Route, ready: Mapping[str, Sequence[Replica]], any_target: bool) -> TargetChoice:
    why = "no target has a replica that can take it" if any_target else "the route has no target with a share"
    for place, deployment_id in enumerate(route.fallbacks, 1):
        if ready.get(deployment_id):
            return TargetChoice(deployment_id=deployment_id, role=FALLBACK, reason=f"{why}; fallback {place}")
    return TargetChoice(deployment_id=None, reason=f"{why}, nor a fallback" if route.fallbacks else why)


def _shadows(route: Route, ready: Mapping[str, Sequence[Replica]], chosen: str, draw: float) -> tuple[str, ...]:
    """Shadows that get a copy of this request: each its percentage, drawn for itself."""
    return tuple(
        each.deployment_id
        for each in route.targets
        if each.role == SHADOW
        and each.deployment_id != chosen
        and ready.get(each.deployment_id)
        and rendezvous.uniform(str(draw), each.deployment_id) * 100 < each.weight
    )


def _wished(route: Route, ready: Mapping[str, Sequence[Replica]], hints: Hints) -> TargetChoice:
    """What a header names, within the route. What cannot be had is refused: elsewhere would mislead who asked."""
    roles = dict.fromkeys(route.fallbacks, FALLBACK) | {each.deployment_id: each.role for each in route.targets}
    for deployment_id, role in roles.items():
        replicas = ready.get(deployment_id, ())
        if hints.target and not (replicas and hints.target in (deployment_id, replicas[0].deployment_name)):
            continue
        if not hints.replica:
            return TargetChoice(deployment_id=deployment_id, role=role, reason="asked for by header")
        for each in replicas:
            if hints.replica in (each.id, each.name):
                return TargetChoice(
                    deployment_id=deployment_id, role=role, reason="asked for by header", replica_id=each.id
                )
    asked = " of ".join(repr(each) for each in (hints.replica, hints.target) if each)
    return TargetChoice(deployment_id=None, reason=f"{asked} was asked for by header and cannot take it")
