"""What the pages of routes show: targets with their shares, rules and objectives by name."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from django.utils.translation import gettext as _

from console.fleet.models import Route, RouteTarget, TargetAnalysis
from console.pricing.models import Price


@dataclass(frozen=True)
class TargetRow:
    """A target and its share of the requests; a shadow's is of copies."""

    target: RouteTarget
    share: float
    at: float  # where its part of the bar begins, 0..1
    ready: int

    @property
    def analysis(self) -> TargetAnalysis | None:
        """How a canary or shadow does; a stable target is what it is compared with."""
        is_judged = self.target.role != RouteTarget.Role.STABLE
        return getattr(self.target, "analysis", None) if is_judged else None


@dataclass(frozen=True)
class RouteRow:
    """A route with what belongs to it."""

    route: Route
    targets: Sequence[TargetRow]
    fallbacks: Sequence[str]
    prices: Sequence[Price]
    ready: int

    @classmethod
    def of(cls, route: Route, ready: Mapping[uuid.UUID, int], prices: Sequence[Price]) -> RouteRow:
        """`ready` is the number of ready replicas by deployment."""
        targets = sorted(route.targets.all(), key=lambda t: (t.role == RouteTarget.Role.SHADOW, t.id))
        total = sum(target.weight for target in targets if target.role != RouteTarget.Role.SHADOW)
        rows, at = [], 0.0
        for target in targets:
            is_shadow = target.role == RouteTarget.Role.SHADOW
            share = target.weight / 100 if is_shadow else target.weight / total if total else 0.0
            rows.append(TargetRow(target, share, at, ready.get(target.deployment_id, 0)))
            at += 0.0 if is_shadow else share
        reached = sum(row.ready for row in rows if row.target.role != RouteTarget.Role.SHADOW and row.target.weight)
        return cls(route, rows, [fallback.deployment.name for fallback in route.fallbacks.all()], prices, reached)

    @property
    def split(self) -> list[TargetRow]:
        """The targets that take requests."""
        return [row for row in self.targets if row.target.role != RouteTarget.Role.SHADOW]


def objective_rows(route: Route) -> list[tuple[str, str, str, str]]:
    """Field, title, value and unit."""
    return _plain(
        ("objective_availability", _("Availability"), route.objective_availability, ""),
        ("objective_ttft_p99_ms", _("TTFT p99"), route.objective_ttft_p99_ms, "ms"),
        ("objective_itl_p99_ms", _("ITL p99"), route.objective_itl_p99_ms, "ms"),
        ("objective_jitter", _("Jitter, p99 ÷ p50"), route.objective_jitter, ""),
    )


def rule_rows(route: Route) -> list[tuple[str, str, str, str]]:
    """Field, title, value and unit of what bounds a request."""
    return _plain(
        ("queue_timeout_s", _("Longest wait in the queue"), route.queue_timeout_s, "s"),
        ("max_queued", _("Most requests waiting"), route.max_queued, ""),
        ("max_queued_tokens", _("Most tokens waiting"), route.max_queued_tokens, ""),
        ("max_attempts", _("Attempts before the first byte"), route.max_attempts, ""),
        ("hedge_after_s", _("Second copy after"), route.hedge_after_s, "s"),
        ("first_token_deadline_s", _("Deadline of the first token"), route.first_token_deadline_s, "s"),
        ("inter_token_deadline_s", _("Deadline between tokens"), route.inter_token_deadline_s, "s"),
        ("deadline_s", _("Deadline without streaming"), route.deadline_s, "s"),
        ("hold_s", _("Longest wait for a start"), route.hold_s, "s"),
        ("max_held", _("Most requests held for a start"), route.max_held, ""),
        ("max_model_len", _("Context"), route.max_model_len, _("tok")),
        ("max_prompt_tokens", _("Longest prompt"), route.max_prompt_tokens, _("tok")),
        ("default_max_tokens", _("Longest answer where none is asked"), route.default_max_tokens, _("tok")),
    )


def _plain(*rows: tuple[str, str, float | None, str]) -> list[tuple[str, str, str, str]]:
    """Values as a person would type them; an empty text where there is none."""

    def typed(value: float | None) -> str:
        return "" if value is None else f"{Decimal(str(value)).normalize():f}"

    return [(name, title, typed(value), unit) for name, title, value, unit in rows]
