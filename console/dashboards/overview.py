"""What the overview shows: one Snapshot of a scope and a window, its verdict, and its parts as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from console import contract
from console.base.templatetags.fanlight import state_title
from console.fleet import live
from console.fleet.models import Replica, Route, Transition
from console.telemetry import names, queries, windows
from console.telemetry.kept import Kept
from console.telemetry.models import RequestRecord
from console.telemetry.scope import Scope
from console.telemetry.trace import layer_title, of_record

PARTS = ("notice", "verdict", "figures", "replicas", "slow", "transitions")
QUERY_MS = 4_000
_SPEAKING = {Replica.State.VERIFYING, Replica.State.READY, Replica.State.HUNG, Replica.State.DRAINING}


@dataclass(frozen=True)
class ReplicaNow:
    """A replica and what its worker last said; `stats` is empty when it is silent."""

    replica: Replica
    stats: Mapping[str, Any]
    held_bytes: int | None = None  # on its devices, as measured from outside

    @classmethod
    def of(cls, replica: Replica, stats: Mapping[str, Any] | None, held_bytes: int | None = None) -> ReplicaNow:
        """What a worker said before it ended is not said of its successor, or of none."""
        return cls(replica, (stats or {}) if replica.state in _SPEAKING else {}, held_bytes)

    @property
    def memory_bytes(self) -> int | None:
        """What it says of itself, else what it was seen to hold: not every engine says it."""
        told = self.stats.get("rss_bytes")
        return self.held_bytes if told is None else int(told)

    @property
    def kv_usage(self) -> float | None:
        return self.stats.get("kv_usage")

    @property
    def kv_used_blocks(self) -> int | None:
        if "held_blocks" in self.stats:  # of a pool that lends, blocks are neither free nor used
            return int(self.stats["held_blocks"])
        total, free = self.stats.get("num_blocks"), self.stats.get("free_blocks")
        return None if total is None or free is None else total - free

    @property
    def slots_share(self) -> float | None:
        slots = self.stats.get("max_num_seqs")
        return self.stats.get("running", 0) / slots if slots else None


@dataclass(frozen=True)
class Snapshot:
    """Everything on the overview at one moment, for one scope. Idempotent: the newest one is all a page needs."""

    at: datetime
    key: str
    is_admin: bool
    traffic: queries.Traffic
    rate: queries.Rate
    slow: list[RequestRecord]
    names: names.Names
    replicas: list[ReplicaNow]
    routes: list[tuple[str, int]]  # public name, ready replicas behind it
    transitions: list[Transition]
    window: windows.Window
    alone: bool  # Valkey is away: this process's gateway counts limits by itself

    @property
    def kv_usage(self) -> float | None:
        """Blocks in use over all replicas that speak."""
        blocks = [(r.kv_used_blocks, r.stats.get("num_blocks")) for r in self.replicas]
        total = sum(n for used, n in blocks if used is not None and n)
        return sum(used for used, n in blocks if used is not None and n) / total if total else None

    @property
    def is_empty(self) -> bool:
        return self.traffic.total.requests == 0


def take(scope: Scope, key: str, now: datetime | None = None) -> Snapshot:
    """Read a snapshot. Raises queries.TooSlow."""
    now = now or datetime.now(UTC)
    window = windows.latest(key, now)
    is_admin = scope.tenant_ids is None
    with queries.reading(QUERY_MS):
        traffic = queries.traffic(scope, window)
        rate = queries.rate(scope, now)
        slow = queries.slowest(scope, window)
        known = names.of(slow, scope)
        replicas = list(Replica.objects.select_related("deployment__model"))
        routes = _routes(replicas)
        transitions = list(Transition.objects.all()[:6]) if is_admin else []
    stats = live.read(str(r.id) for r in replicas) if is_admin else {}
    return Snapshot(
        now,
        key,
        is_admin,
        traffic,
        rate,
        slow,
        known,
        [ReplicaNow.of(r, stats.get(str(r.id))) for r in replicas],
        routes,
        transitions,
        window,
        contract.alone(),
    )


def _routes(replicas: list[Replica]) -> list[tuple[str, int]]:
    ready: dict[Any, int] = {}
    for replica in replicas:
        if replica.state == Replica.State.READY:
            ready[replica.deployment_id] = ready.get(replica.deployment_id, 0) + 1
    routes = Route.objects.prefetch_related("targets")
    return [(r.name, sum(ready.get(t.deployment_id, 0) for t in r.targets.all())) for r in routes]


# Shared by pages and sockets of this process.
kept: Kept[Snapshot] = Kept(floor_s=1.0)


def newest(scope: Scope, key: str) -> Snapshot:
    """A snapshot that is fresh enough for what it costs."""
    return kept.get((scope, key), lambda: take(scope, key))


# ---------------------------------------------------------------------------------------------------------------
# What is sent and shown


def render(snapshot: Snapshot) -> dict[str, str]:
    """The page's live parts in the active language and zone."""
    context = {
        "s": snapshot,
        "verdict": verdict(snapshot),
        "why": {r.id: why_slow(r) for r in snapshot.slow},
    }
    return {part: render_to_string(f"dashboards/_{part}.html", context) for part in PARTS}


def series(snapshot: Snapshot) -> dict[str, Any]:
    """The charts' numbers: milliseconds, one entry per bar; None where nothing was measured."""
    bars = snapshot.traffic.slices

    def pairs(name: str) -> list[list[float | None]]:
        return [[None if v is None else round(v / 1000, 1) for v in getattr(bar, name)] for bar in bars]

    return {
        "start": snapshot.window.start.timestamp(),
        "step": snapshot.window.bucket_s,
        "ttft": pairs("ttft"),
        "itl": pairs("itl"),
        "queue": pairs("queue"),
        "ok": [bar.ok for bar in bars],
        "cancelled": [bar.cancelled for bar in bars],
        "rejected": [bar.rejected for bar in bars],
        "failed": [bar.failed for bar in bars],
        "hit": [None if bar.hit_rate is None else round(bar.hit_rate, 4) for bar in bars],
        "input": [bar.prompt_tokens for bar in bars],
        "output": [bar.completion_tokens for bar in bars],
        "query": snapshot.window.query,
    }


@dataclass(frozen=True)
class Verdict:
    """Is it healthy: a status and sentences, the worst first."""

    css: str
    sentences: list[str]


def verdict(snapshot: Snapshot) -> Verdict:
    """Say it in words. Only facts that are on the page."""
    ready = sum(1 for r in snapshot.replicas if r.replica.state == Replica.State.READY)
    total = len(snapshot.replicas)
    css, sentences = "good", []
    if total == 0:
        return Verdict("idle", [_("No model is deployed yet, so every request is answered with 503.")])
    if ready == 0:
        css = "bad"
        sentences.append(_("No replica is ready: requests are answered with 503 until one is."))
    elif ready < total:
        css = "warn"
        sentences.append(_("%(ready)s of %(total)s replicas are ready.") % {"ready": ready, "total": total})
    else:
        sentences.append(ngettext("The replica is ready.", "All %(n)s replicas are ready.", total) % {"n": total})
    if snapshot.is_admin and ready < total:
        sentences += [
            _("%(replica)s is %(state)s: %(reason)s.")
            % {
                "replica": r.replica,
                "state": state_title(r.replica.state),
                "reason": r.replica.reason.rstrip(".") or "–",
            }
            for r in snapshot.replicas
            if r.replica.state != Replica.State.READY
        ][:2]
    whole = snapshot.traffic.total
    if whole.requests and (whole.failed_share or 0) >= 0.01:
        css = "bad" if (whole.failed_share or 0) >= 0.05 or css == "bad" else "warn"
        sentences.append(
            ngettext(
                "%(n)s of %(total)s requests failed in this time.",
                "%(n)s of %(total)s requests failed in this time.",
                whole.failed,
            )
            % {"n": f"{whole.failed:,}", "total": f"{whole.requests:,}"}
        )
    elif whole.requests:
        sentences.append(_("%(share)s %% of requests in this time did not fail.") % {"share": _good_share(whole)})
    return Verdict(css, sentences)


def _good_share(whole: queries.Slice) -> str:
    share = 1 - (whole.failed_share or 0)
    return "100" if whole.failed == 0 else f"{min(share * 100, 99.99):.2f}"


def why_slow(row: RequestRecord) -> str:
    """One sentence on what a slow request waited for."""
    shares = sorted(of_record(row, True), key=lambda s: -s.us)
    if not shares:
        return ""
    top = shares[0]
    values = {
        "seconds": f"{top.us / 1e6:,.2f}",
        "tokens": f"{max(0, row.prompt_tokens - row.cached_tokens):,}",
        "cached": f"{row.cached_tokens:,}",
        "layer": layer_title(top.layer),
    }
    match top.layer:
        case "prefill":
            return _("Prefill of %(tokens)s tokens took %(seconds)s s; %(cached)s were cached.") % values
        case "queue":
            return _("Waited %(seconds)s s for a free slot.") % values
        case "equeue":
            return _("Waited %(seconds)s s in the engine.") % values
        case _:
            return _("%(seconds)s s went into: %(layer)s.") % values
