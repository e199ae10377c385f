"""From a request's phases and events to what its page draws and says: pure, times in microseconds since received.

Phases of serving.port become seven layers; what no phase covers is a layer of its own, "none", never stretched away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from console.telemetry.engine_spans import Drawn
from console.telemetry.models import RequestRecord

LAYER_OF = {
    "receive": "gateway",
    "auth": "gateway",
    "admission": "gateway",
    "start": "queue",
    "queue": "queue",
    "routing": "routing",
    "connect": "gateway",
    "tokenize": "equeue",
    "engine_queue": "equeue",
    "prefill": "prefill",
    "decode": "decode",
    "engine": "decode",
    "deliver": "gateway",
    "settle": "gateway",
}
LAYERS = ("gateway", "queue", "routing", "equeue", "prefill", "decode", "none")
HATCHED = {"queue", "equeue"}
# Rows of the waterfall, top to bottom: which phases share one.
_ROWS = (
    ("receive", "auth", "admission"),
    ("start",),
    ("queue",),
    ("routing",),
    ("connect",),
    ("tokenize", "engine_queue"),
    ("prefill",),
    ("engine",),
    ("decode",),
    ("deliver", "settle"),
)
_VISIBLE_GAP_US = 20  # a hole between phases shorter than this is two stamps, not a mystery

Phase = tuple[str, int, int, Mapping[str, Any]]


def layer_title(layer: str) -> str:
    """The layer's name for a person."""
    return {
        "gateway": pgettext("layer", "gateway"),
        "queue": pgettext("layer", "queue"),
        "routing": pgettext("layer", "routing"),
        "equeue": pgettext("layer", "engine queue"),
        "prefill": pgettext("layer", "prefill"),
        "decode": pgettext("layer", "decode"),
        "none": pgettext("layer", "unattributed"),
    }[layer]


def _phase_title(phase: str) -> str:
    return {
        "receive": pgettext("phase", "receive"),
        "auth": pgettext("phase", "auth"),
        "admission": pgettext("phase", "admission"),
        "start": pgettext("phase", "start"),
        "queue": pgettext("phase", "queue"),
        "routing": pgettext("phase", "routing"),
        "connect": pgettext("phase", "connect"),
        "tokenize": pgettext("phase", "tokenize"),
        "engine_queue": pgettext("phase", "engine queue"),
        "prefill": pgettext("phase", "prefill"),
        "decode": pgettext("phase", "decode"),
        "engine": pgettext("phase", "engine"),
        "deliver": pgettext("phase", "deliver"),
        "settle": pgettext("phase", "settle"),
    }.get(phase, phase)


def _row_title(phases: tuple[str, ...]) -> str:
    return {
        "receive": _("Gateway"),
        "start": _("Start"),
        "queue": _("Queue"),
        "routing": _("Routing"),
        "connect": _("Connect"),
        "tokenize": _("Engine queue"),
        "prefill": _("Prefill"),
        "engine": _("Engine"),
        "decode": _("Decode"),
        "deliver": _("Settle"),
    }[phases[0]]


@dataclass(frozen=True)
class Segment:
    """One bar: from, to, and the words inside it where there is room."""

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Row:
    """One line of the waterfall."""

    layer: str
    title: str
    note: str
    segments: list[Segment]

    @property
    def total(self) -> int:
        return sum(s.end - s.start for s in self.segments)

    @property
    def data(self) -> list[list[Any]]:
        """For the drawing: [[from, to, label], …]."""
        return [[s.start, s.end, s.label] for s in self.segments]


@dataclass(frozen=True)
class Share:
    """Time of one layer within a span, and its part of it."""

    layer: str
    us: int
    share: float

    @property
    def title(self) -> str:
        return layer_title(self.layer)


@dataclass(frozen=True)
class Trace:
    """Everything drawn from one request's detail."""

    duration: int
    ttft: int | None
    rows: list[Row] = field(default_factory=list)
    to_first_token: list[Share] = field(default_factory=list)
    whole: list[Share] = field(default_factory=list)
    attributed: float = 0.0  # share of the wall time that phases cover, rounded down


def build(row: RequestRecord, body: Mapping[str, Any], spans_told: Sequence[Drawn] = ()) -> Trace:
    """Lay a request's phases out. Works without a detail: then from the record's sums, and says so by having no rows."""  # noqa: E501
    phases: list[Phase] = sorted(
        ((name, int(a), int(b), args or {}) for name, a, b, args in body.get("phases", ())),
        key=lambda p: (p[1], p[2]),
    )
    duration = max([row.duration_us, *(p[2] for p in phases)])
    holes = uncovered(phases, duration)
    spans = [(LAYER_OF.get(name, "none"), a, b) for name, a, b, _args in phases]
    spans += [("none", a, b) for a, b in holes]
    rows = _rows(phases, body, row)
    visible = [Segment(a, b, "") for a, b in holes if b - a >= _VISIBLE_GAP_US]
    if visible:
        rows.append(Row("none", _("Unattributed"), _("no phase covers it"), visible))
    rows += [_span_row(span, duration) for span in spans_told]
    covered = duration - sum(b - a for a, b in holes)
    return Trace(
        duration,
        row.ttft_us,
        rows,
        shares(spans, row.ttft_us) if row.ttft_us else [],
        shares(spans, duration),
        math.floor(1000 * covered / duration) / 1000 if duration and phases else 0.0,
    )


def uncovered(phases: Sequence[Phase], duration: int) -> list[tuple[int, int]]:
    """The parts of [0, duration] that no phase covers."""
    holes, at = [], 0
    for _name, start, end, _args in phases:
        if start > at:
            holes.append((at, min(start, duration)))
        at = max(at, end)
    if at < duration:
        holes.append((at, duration))
    return holes


def shares(spans: Sequence[tuple[str, int, int]], until: int) -> list[Share]:
    """Time by layer within [0, until], in the order of LAYERS."""
    sums = dict.fromkeys(LAYERS, 0)
    for layer, start, end in spans:
        sums[layer] += max(0, min(end, until) - max(0, start))
    return [Share(layer, us, us / until) for layer, us in sums.items() if us > 0 and until > 0]


def of_record(row: RequestRecord, until_first_token: bool) -> list[Share]:
    """The layers from the record's sums alone, for the small waterfalls of a list."""
    waiting = row.queue_us + row.engine_queue_us + row.prefill_us
    until = first_token_us(row) if until_first_token else row.duration_us
    gateway = min(row.gateway_us, max(0, until - waiting)) if until_first_token else row.gateway_us
    sums = [
        ("gateway", gateway),
        ("queue", row.queue_us),
        ("equeue", row.engine_queue_us),
        ("prefill", row.prefill_us),
    ]
    # A first token is handed over after the engine made it: what lies between is decode, here as on the request's page.
    rest = max(0, until - sum(us for _layer, us in sums))
    decode = min(row.decode_us, max(0, rest - row.unattributed_us)) if until_first_token else row.decode_us
    sums += [("decode", decode), ("none", max(0, rest - decode))]
    return [Share(layer, us, us / until) for layer, us in sums if us > 0 and until > 0]


def first_token_us(row: RequestRecord) -> int:
    """TTFT; for an answer in one piece what came before its first token, as far as phases tell."""
    return row.ttft_us or row.gateway_us + row.queue_us + row.engine_queue_us + row.prefill_us


# ---------------------------------------------------------------------------------------------------------------
# Rows


def _rows(phases: Sequence[Phase], body: Mapping[str, Any], row: RequestRecord) -> list[Row]:
    rows = []
    for names in _ROWS:
        members = [p for p in phases if p[0] in names]
        if members:
            rows.append(
                Row(
                    LAYER_OF[names[0]],
                    _row_title(names),
                    _note(names[0], members, body, row),
                    _segments(names[0], members, row),
                )
            )
    return rows


def _span_row(span: Drawn, duration: int) -> Row:
    """What the engine traced of it, by its own clock; beside the phases, which it does not change."""
    parts = span.parts or ((span.name, span.start, span.end),)
    segments = [
        Segment(max(0, start), min(end, duration), _phase_title(name))
        for name, start, end in parts
        if end > start and start < duration and end > 0
    ]
    note = _("span %(name)s, as the engine traced it") % {"name": span.name}
    return Row("equeue", span.service or span.name, note, segments)


def _segments(kind: str, members: Sequence[Phase], row: RequestRecord) -> list[Segment]:
    if kind == "prefill":
        return [s for phase in members for s in _chunks(phase)]
    if kind == "decode" and row.completion_tokens:
        words = ngettext("decode, %(n)s token", "decode, %(n)s tokens", row.completion_tokens)
        return [Segment(a, b, words % {"n": f"{row.completion_tokens:,}"}) for _name, a, b, _args in members]
    return [Segment(a, b, _phase_title(name)) for name, a, b, _args in members]


def _chunks(phase: Phase) -> list[Segment]:
    """Prefill cut where its chunks began, as the engine told: `parts` is [[start, tokens], …]."""
    _name, start, end, args = phase
    parts = [(int(at), int(tokens)) for at, tokens in args.get("parts", ()) if start <= at <= end]
    if len(parts) < 2:
        return [Segment(start, end, _prefill_label(parts))]
    edges = [start, *(at for at, _tokens in parts[1:]), end]
    return [
        Segment(
            edges[n],
            edges[n + 1],
            _("chunk %(number)s, %(tokens)s tokens") % {"number": n + 1, "tokens": f"{tokens:,}"},
        )
        for n, (_at, tokens) in enumerate(parts)
    ]


def _prefill_label(parts: Sequence[tuple[int, int]]) -> str:
    if not parts:
        return _("prefill")
    tokens = sum(n for _at, n in parts)
    return ngettext("%(n)s token", "%(n)s tokens", tokens) % {"n": f"{tokens:,}"}


def _note(kind: str, members: Sequence[Phase], body: Mapping[str, Any], row: RequestRecord) -> str:
    match kind:
        case "receive" | "tokenize" | "deliver":
            return pgettext("between the items of a list", ", ").join(_phase_title(name) for name, *_rest in members)
        case "routing":
            n = len(body.get("candidates", ()))
            return ngettext("%(n)s candidate", "%(n)s candidates", n) % {"n": n} if n else ""
        case "start":
            return _("waiting for the model to be started")
        case "queue":
            ahead = members[0][3].get("ahead")
            if isinstance(ahead, int):
                return ngettext("%(n)s ahead", "%(n)s ahead", ahead) % {"n": ahead}
            return _("waiting for a slot")
        case "prefill":
            return _("%(tokens)s computed") % {"tokens": f"{computed_tokens(row, body):,}"}
        case "decode" if row.preemptions:
            return pgettext("between the items of a list", ", ").join(_preemptions(row.preemptions, body))
    return ""


def _preemptions(count: int, body: Mapping[str, Any]) -> list[str]:
    """How often it lost its blocks, and how many came back from host memory instead of being computed again."""
    words = [ngettext("%(n)s preemption", "%(n)s preemptions", count) % {"n": count}]
    names = [(name, args or {}) for _source, name, _t, args in body.get("events", ())]
    first = next((at for at, (name, _args) in enumerate(names) if name == "PREEMPTED"), len(names))
    back = sum(int(args.get("blocks", 0)) for name, args in names[first:] if name == "SWAPPED_IN")
    if back:
        words.append(ngettext("%(n)s block swapped in", "%(n)s blocks swapped in", back) % {"n": back})
    return words


def computed_tokens(row: RequestRecord, body: Mapping[str, Any]) -> int:
    """Prompt tokens that were computed: as the engine says, else those no cache held."""
    told = body.get("engine", {}).get("computed_tokens")
    return told if isinstance(told, int) else max(0, row.prompt_tokens - row.cached_tokens)


# ---------------------------------------------------------------------------------------------------------------
# Events, blocks, gaps


@dataclass(frozen=True)
class Event:
    """One event of the merged list."""

    source: str
    name: str
    t: int
    text: str


def events(body: Mapping[str, Any]) -> list[Event]:
    """Gateway and engine events on one clock, in time order."""
    found = [
        Event(source, name.lower(), int(t), _arguments(args or {})) for source, name, t, args in body.get("events", ())
    ]
    return sorted(found, key=lambda e: e.t)


def event_title(name: str) -> str:
    """An engine event's name for a person; unknown ones stay as they are."""
    return {
        "received": _("received"),
        "tokenized": _("tokenized"),
        "queued": _("queued"),
        "grammar_ready": _("grammar ready"),
        "scheduled": _("scheduled"),
        "chunk": _("chunk"),
        "first_token": _("first token"),
        "stream_start": _("stream start"),
        "preempted": _("preempted"),
        "swapped_out": _("swapped out"),
        "swapped_in": _("swapped in"),
        "resumed": _("resumed"),
        "finished": _("finished"),
    }.get(name, name.replace("_", " "))


def _arguments(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in args.items() if value not in (None, ""))


def _value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


@dataclass(frozen=True)
class Blocks:
    """KV blocks of a request by where their tokens came from."""

    size: int
    cached: int
    computed: int
    generated: int

    @property
    def total(self) -> int:
        return self.cached + self.computed + self.generated


def blocks(row: RequestRecord, body: Mapping[str, Any]) -> Blocks | None:
    """Blocks at the request's end, if the engine told their size. A block counts where its first token came from."""
    size = body.get("engine", {}).get("block_size")
    if not isinstance(size, int) or size < 1 or not row.prompt_tokens:
        return None
    # The last sampled token is never fed back, so its KV is never computed.
    tokens = row.prompt_tokens + max(0, row.completion_tokens - 1)
    total = -(-tokens // size)
    cached = min(row.cached_tokens // size, total)
    prompt = min(-(-row.prompt_tokens // size), total)
    return Blocks(size, cached, prompt - cached, total - prompt)


@dataclass(frozen=True)
class Gaps:
    """Inter-token gaps in units of 100 µs with their exact percentiles in ms."""

    values: list[int]
    p50: float
    p99: float
    largest: float
    largest_at: int  # number of the token after the largest gap; the first token is 1
    dropped: int

    @property
    def last(self) -> int:
        return len(self.values) + 1


def gaps(body: Mapping[str, Any]) -> Gaps | None:
    """The token timeline; None where there was at most one token."""
    values = [int(v) for v in body.get("gaps", ())]
    if not values:
        return None
    ordered = sorted(values)
    largest = ordered[-1]
    return Gaps(
        values,
        _disc(ordered, 0.5) / 10,
        _disc(ordered, 0.99) / 10,
        largest / 10,
        values.index(largest) + 2,
        int(body.get("gaps_dropped", 0)),
    )


def _disc(ordered: Sequence[int], share: float) -> int:
    """The percentile as the gateway takes it for the record, so that both say the same."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


# ---------------------------------------------------------------------------------------------------------------
# What it says


def verdict(row: RequestRecord, trace: Trace, body: Mapping[str, Any]) -> list[str]:
    """Whole sentences on where the time went, the most important first."""
    sentences = []
    ranked = sorted(trace.to_first_token or trace.whole, key=lambda s: -s.us)
    if ranked and trace.to_first_token:
        sentences.append(_first_token_sentence(ranked[0], row, body))
        if len(ranked) > 1 and ranked[1].share >= 0.1:
            sentences.append(_second_sentence(ranked[1]))
    elif ranked:
        values = {"share": round(ranked[0].share * 100), "layer": ranked[0].title}
        text = (
            _(
                "%(share)s %% of the time went into: %(layer)s. The answer came in one piece, so there is no first token."  # noqa: E501
            )
            if row.outcome == "ok"
            else _("No token was sent. %(share)s %% of the time went into: %(layer)s.")
        )
        sentences.append(text % values)
    if row.preemptions:
        sentences.append(
            ngettext(
                "It was preempted %(n)s time: the replica had run out of KV blocks.",
                "It was preempted %(n)s times: the replica had run out of KV blocks.",
                row.preemptions,
            )
            % {"n": row.preemptions}
        )
    found = gaps(body)
    if found and found.p50 and found.largest > 8 * found.p50 and found.largest > 100:
        sentences.append(
            _("The longest pause was %(ms)s ms, before token %(token)s.")
            % {"ms": f"{found.largest:,.0f}", "token": found.largest_at}
        )
    return sentences


def _first_token_sentence(top: Share, row: RequestRecord, body: Mapping[str, Any]) -> str:
    values = {
        "share": round(top.share * 100),
        "tokens": f"{computed_tokens(row, body):,}",
        "cached": f"{row.cached_tokens:,}",
    }
    match top.layer:
        case "prefill" if row.cached_tokens:
            text = _(
                "%(share)s %% of the time to first token was prefill of %(tokens)s tokens; a cache held the other %(cached)s."  # noqa: E501
            )
        case "prefill":
            text = _("%(share)s %% of the time to first token was prefill of %(tokens)s tokens that no cache held.")
        case "queue":
            text = _("%(share)s %% of the time to first token was waiting for a free slot.")
        case "equeue":
            text = _("%(share)s %% of the time to first token was waiting in the engine.")
        case "gateway" | "routing":
            text = _("%(share)s %% of the time to first token was spent in the gateway.")
        case "decode":
            text = _(
                "%(share)s %% of the time to first token was decoding: tokens were held back before the first was sent."
            )
        case _:
            text = _("%(share)s %% of the time to first token is unattributed: no phase covers it.")
    return text % values


def _second_sentence(second: Share) -> str:
    values = {"share": round(second.share * 100)}
    match second.layer:
        case "prefill":
            return _("Another %(share)s %% was prefill.") % values
        case "queue":
            return _("Another %(share)s %% was waiting for a slot.") % values
        case "equeue":
            return _("Another %(share)s %% was waiting in the engine.") % values
        case "none":
            return _("Another %(share)s %% is unattributed.") % values
        case "decode":
            return _("Another %(share)s %% was decoding.") % values
        case _:
            return _("Another %(share)s %% was spent in the gateway.") % values


def advice(code: str, status: int, outcome: str) -> str:
    """What to try after an error; empty where there was none."""
    by_code = {
        "context_length_exceeded": _("Shorten the prompt, or send it to a model with a longer context."),
        "model_not_found": _(
            "Check the model name against GET /v1/models; the key may not be allowed to call this one."
        ),
        "invalid_api_key": _("Check the key: it may be mistyped, revoked or expired."),
        "too_many_in_flight": _("Too many requests are running at once. Retry after the time in Retry-After."),
        "low_disk": _("The disk is nearly full, so new work is refused. Free some space."),
        "permission_denied": _("This key may not do that. Look at its allowed models."),
        "engine_unreachable": _("The worker could not be reached. It is restarted by itself; sending again is safe."),
        "server_shutting_down": _("Fanlight was stopping. Send it again."),
        "rate_limit_exceeded": _("Slow down: honour Retry-After, or ask for a higher limit."),
        "insufficient_quota": _("The budget of this key or tenant is used up."),
        "queue_timeout": _(
            "Every replica was busy for the whole wait. Retry after the time in Retry-After, or add a replica."
        ),
        "deadline_exceeded": _("The route's deadline cut it. Ask for a stream, or for fewer tokens."),
        "timeout": _("The route's deadline cut it. Ask for a stream, or for fewer tokens."),
        "slow_reader": _("The client did not read its stream fast enough. Check proxies between it and Fanlight."),
    }
    if code in by_code:
        return by_code[code]
    by_outcome = {
        "cancelled": _("The client closed the connection. Nothing is wrong on this side."),
        "timeout": by_code["timeout"],
        "slow_reader": by_code["slow_reader"],
        "gateway_lost": _(
            "The gateway process died while it served this. It was billed for what the client had received."
        ),
        "error": _("The replica failed. Look at its transitions: it is restarted by itself; sending again is safe."),
    }
    if outcome in by_outcome:
        return by_outcome[outcome]
    if status == 503:
        return _("No replica could take it. Look at the deployments; retry after the time in Retry-After.")
    if 400 <= status < 500:
        return _("The request itself was refused: the message names the field.")
    return ""


def as_json(value: Any) -> str:
    """Compact JSON that keeps letters readable."""
    return json.dumps(value, ensure_ascii=False)
