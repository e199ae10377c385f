"""What a deployment would take and where it would go, before anything starts: the form's right-hand side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from console.errors import ConsoleError
from console.fleet.models import Deployment
from console.fleet.revisions import config_of
from console.placement import planner, queries
from console.placement.ledger import Need
from console.placement.needs import Sizing, kind_here, need_of, sizing
from console.version import version
from engine import footprint
from engine.footprint import Advice

SHOWN = 12  # cards in the table
BAR = 1000.0  # width of the drawn card


@dataclass(frozen=True)
class Part:
    """One piece of the bar: its name, the class that colours it, where it begins and how wide it is, and its bytes."""

    key: str
    css: str
    x: float
    width: float
    bytes: int


@dataclass(frozen=True)
class Draft:
    """The plan of one replica on the card it would get, or on the one that comes nearest; or why there is none."""

    error: str = ""
    field: str = ""
    sizing: Sizing | None = None
    plan: planner.Plan | None = None
    card: planner.Verdict | None = None  # that the bar is drawn for
    total: int = 0  # bytes of it
    parts: tuple[Part, ...] = ()
    mark: float | None = None  # where gpu_memory_utilization ends on the bar
    pool: int = 0  # bytes of KV that the engine would have there
    at_mean: int = 0  # requests of the planned length that it holds
    longest: int = 0  # tokens of one request
    at_longest: int = 0
    advice: tuple[Advice, ...] = ()
    warning: str = ""

    @property
    def at_once(self) -> int:
        """Requests that run at once: what memory holds, and what the engine takes."""
        return min(self.at_mean, self.sizing.concurrency) if self.sizing else 0


def draft(deployment: Deployment) -> Draft:
    """The plan of an unsaved or changed deployment. Never raises for what a person typed: `error` says it."""
    config = config_of(deployment)
    try:
        kind = kind_here(deployment.engine, deployment.runtime, deployment.binding)
        overhead = _learnt(deployment, kind)
        found = sizing(
            deployment.model, config, engine=deployment.engine, runtime=deployment.runtime, kind=kind, overhead=overhead
        )
        need = need_of(
            deployment.model, config, engine=deployment.engine, runtime=deployment.runtime, kind=kind,
            overhead=overhead, deployment=str(deployment.pk),
        )  # fmt: skip
    except ConsoleError as error:
        return Draft(error=str(error), field=getattr(error, "field", ""))
    cards = queries.cards()
    plan = planner.plan(need, cards, queries.policy())
    return _drawn(deployment, found, need, plan, {card.uid: card.total for card in cards})


def _learnt(deployment: Deployment, kind: str) -> int | None:
    runtime = deployment.runtime.requirement if deployment.runtime else version()
    return queries.learnt_overhead(deployment.engine, runtime, kind)


def _drawn(deployment: Deployment, found: Sizing, need: Need, plan: planner.Plan, totals: Mapping[str, int]) -> Draft:
    card = next((each for each in plan.verdicts if each.chosen), plan.verdicts[0] if plan.verdicts else None)
    advised = footprint.advice(found.shape.parameters, found.shape.weights_bytes, footprint.kept_bytes(found.shape))
    if card is None:
        return Draft(sizing=found, plan=plan, advice=tuple(advised))
    total = totals[card.uid]
    share = float(deployment.parameters.get("gpu_memory_utilization") or 0)
    pool = _pool(deployment, found, need, total, share)
    size = found.block_size, found.kv_dtype_bytes, found.tensor_parallel
    longest = int(deployment.parameters.get("max_model_len") or found.shape.context)
    return Draft(
        sizing=found,
        plan=plan,
        card=card,
        total=total,
        parts=_parts(found, pool, card, total),
        mark=BAR * share if share else None,
        pool=pool,
        at_mean=footprint.buys(pool, found.shape, found.tokens, *size),
        longest=longest,
        at_longest=footprint.buys(pool, found.shape, longest, *size),
        advice=tuple(advised),
        warning=(footprint.utilisation_warning(share) or "") if share else "",
    )


def _pool(deployment: Deployment, found: Sizing, need: Need, total: int, share: float) -> int:
    """KV that the engine would have: what it takes at start and does not need for the rest, or what was planned."""
    if need.takes_share:
        return footprint.kv_pool(total, share or need.takes_share, found.peak)
    return max(found.peak.kv, need.takes - (found.peak.total - found.peak.kv))


def _parts(found: Sizing, pool: int, card: planner.Verdict, total: int) -> tuple[Part, ...]:
    """From left to right: what others hold, this replica, its buffer; what is free is what remains."""
    peak = found.peak
    buffer = max(0, card.needed - peak.total)
    sizes = (
        ("others", "m-none", max(0, total - max(card.free, 0))),
        ("weights", "m-weights", peak.weights),
        ("activations", "m-act", peak.activations),
        ("overhead", "m-over", peak.overhead),
        ("kv", "m-kv", peak.kv),
        ("spare", "m-kvfree", max(0, pool - peak.kv)),
        ("buffer", "m-buffer", buffer),
    )
    whole = max(total, sum(size for _key, _css, size in sizes))
    parts, x = [], 0.0
    for key, css, size in sizes:
        width = BAR * size / whole
        parts.append(Part(key, css, round(x, 1), round(width, 1), size))
        x += width
    return tuple(parts)
