"""Requests: the list, its export, and one request."""

from __future__ import annotations

import csv
import io
import uuid
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib import messages
from django.core.handlers.asgi import ASGIRequest
from django.db import connections
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from console.base.fields import told
from console.base.views import actor_of, too_slow
from console.billing.bill import bill_of
from console.errors import ConsoleError
from console.playground.consumers import PARAMS
from console.telemetry import content, engine_spans, filters, names, queries, trace, windows
from console.telemetry.filters import BadFilter, Condition
from console.telemetry.kept import Kept
from console.telemetry.models import RequestRecord
from console.telemetry.scope import Scope, scope_of
from console.telemetry.windows import Window
from serving.port import SUMMARISED

_STILL_POSSIBLE = timedelta(minutes=30)  # how long a request may run or be under way to the database
_GROUP_TITLES: dict[str, Callable[[], str]] = {
    "layer": lambda: _("slowest layer"),
    "model": lambda: _("model"),
    "tenant": lambda: _("tenant"),
    "key": lambda: _("key"),
    "replica": lambda: _("replica"),
    "outcome": lambda: _("outcome"),
    "cached": lambda: _("cached or not"),
}
_LAYER_CSS = {"engine_queue": "equeue", "unattributed": "none"}
# A cell that a spreadsheet would take for a formula is told to be text.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Asked:
    """What the URL of a list asks for: window, conditions, page."""

    def __init__(self, request: HttpRequest, scope: Scope) -> None:
        get = request.GET
        self.scope = scope
        self.zone = timezone.get_current_timezone()  # an export is written after the request's own zone has ended
        self.window = windows.parse(get.get("range", ""), get.get("from", ""), get.get("to", ""), self.zone)
        self.text = get.get("q", "").strip()
        self.error = ""
        self.conditions: tuple[Condition, ...] = ()
        self.resolved: tuple[Condition, ...] = ()
        try:
            self.conditions = filters.parse(self.text)
            self.resolved = names.resolve(self.conditions, scope)
        except BadFilter as error:
            self.error = str(error)
        self.before = _uuid(get.get("before"))
        self.after = _uuid(get.get("after"))
        group = get.get("group", "layer")
        self.group = group if group in queries.GROUPS else "layer"

    @property
    def query(self) -> str:
        """The list's own URL, without its page."""
        parts = {"q": filters.unparse(self.conditions)} if self.conditions else {}
        return self.window.query + ("&" + urlencode(parts) if parts else "")

    @property
    def key(self) -> Hashable:
        """What the figures above the list depend on; a range that ends now is one thing, however now moves."""
        window = self.window
        span = window.key if window.key in windows.RANGES else (window.start, window.end)
        return self.scope, span, self.resolved, self.group

    @property
    def ttft_range(self) -> list[float | None]:
        """The part of the histogram that conditions select, in ms."""
        low = high = None
        for c in self.conditions:
            if c.field == "ttft_us" and not c.negated:
                if c.op in {">", ">="}:
                    low = c.number / 1000
                elif c.op in {"<", "<="}:
                    high = c.number / 1000
        return [low, high]


@require_GET
def requests(request: HttpRequest) -> HttpResponse:
    """Newest first, filtered, a page at a time."""
    asked = Asked(request, scope_of(request.user))
    try:
        with queries.reading():
            context = _list(asked)
    except queries.TooSlow:
        return too_slow(request)
    template = "telemetry/_requests.html" if _is_partial(request) else "telemetry/requests.html"
    return render(request, template, context)


@dataclass(frozen=True)
class Told:
    """What stands above the list: dear where there are many rows, and the same on every page of it."""

    summary: queries.Summary | None = None
    histogram: queries.Histogram | None = None
    groups: Sequence[queries.Group] = ()


kept: Kept[Told] = Kept()


def _tell(asked: Asked) -> Told:
    wanted, window, scope = asked.resolved, asked.window, asked.scope
    return Told(
        queries.summary(scope, window, wanted),
        queries.histogram(scope, window, wanted),
        queries.groups(scope, window, wanted, asked.group),
    )


def _is_partial(request: HttpRequest) -> bool:
    return bool(request.headers.get("HX-Request")) and not request.headers.get("HX-History-Restore-Request")


def _list(asked: Asked) -> dict[str, Any]:
    wanted, window, scope = asked.resolved, asked.window, asked.scope
    page = queries.Page([], None, None)
    told = Told()
    if not asked.error:
        page = queries.page(scope, window, wanted, asked.before, asked.after)
        told = kept.get(asked.key, lambda: _tell(asked))
    groups = told.groups
    known = names.by_ids(
        scope,
        [*(r.tenant_id for r in page.records), *_group_ids(groups, asked.group, "tenant")],
        [*(r.key_id for r in page.records), *_group_ids(groups, asked.group, "key")],
        [*(r.replica_id for r in page.records), *_group_ids(groups, asked.group, "replica")],
    )
    longest_ttft = max((trace.first_token_us(r) for r in page.records), default=0)
    longest = max((r.duration_us for r in page.records), default=0)
    return {
        "asked": asked,
        "window": window,
        "custom_range": True,
        "page": page,
        "names": known,
        "summary": told.summary,
        "histogram": told.histogram,
        "groups": [_group(g, asked, known) for g in groups],
        "group_choices": [
            (key, title())
            for key, title in _GROUP_TITLES.items()
            if key != "tenant" or scope.tenant_ids is None or len(scope.tenant_ids) > 1
        ],
        "tokens": [_token(c, asked) for c in asked.conditions],
        "saved": _saved(asked),
        "longest_ttft": longest_ttft,
        "longest": longest,
        "ttft_ticks": _ticks(longest_ttft),
        "ticks": _ticks(longest),
        "show_tenant": scope.tenant_ids is None or len(scope.tenant_ids) > 1,
        "per_page": queries.PAGE,
        "cap": queries.CAP,
        "export_cap": queries.EXPORT_CAP,
        "problem": _window_problem(window),
    }


def _window_problem(window: Window) -> str:
    return {
        "bad-time": _("That time could not be read; the last hour is shown. Write it like 2026-11-24T14:30."),
        "empty": _("The range ended before it began; the last hour is shown."),
        "too-long": _("At most 31 days are shown at once; this is the newest part of the range."),
    }.get(window.problem, "")


def _token(condition: Condition, asked: Asked) -> dict[str, str]:
    """A condition as a token, and the list without it."""
    text = condition.text
    head = len(text)
    for mark in (":", ">", "<", "="):
        at = text.find(mark)
        if 0 <= at < head:
            head = at
    cut = head + 1 if text[head : head + 1] == ":" else head
    rest = filters.unparse(c for c in asked.conditions if c is not condition)
    return {"name": text[:cut], "value": text[cut:] or text, "without": rest}


def _saved(asked: Asked) -> list[dict[str, Any]]:
    choices = [
        (_("Slow first token"), "ttft>800ms"),
        (_("Nothing cached"), "cached=0 prompt>256"),
        (_("Preempted"), "preempted>0"),
        (_("Left before the first token"), "status:cancelled output=0"),
        (_("Failed"), "status:error,timeout,gateway_lost"),
        (_("Rejected"), "status:rejected"),
        (_("From the playground"), "source:playground"),
    ]
    return [{"title": title, "q": q, "current": asked.text == q} for title, q in choices]


def _group_ids(groups: Sequence[queries.Group], by: str, kind: str) -> list[uuid.UUID]:
    return [uuid.UUID(g.value) for g in groups if g.value] if by == kind else []


def _group(group: queries.Group, asked: Asked, known: names.Names) -> dict[str, Any]:
    """A row of the group table with its own link: the list, narrowed to it."""
    value = group.value or ""
    title, condition, layer = value or _("none"), "", ""
    match asked.group:
        case "layer":
            layer = _LAYER_CSS.get(value, value)
            title, condition = trace.layer_title(layer), f"layer:{value}"
        case "tenant" | "key" | "replica":
            table: Any = {
                "tenant": known.tenants,
                "key": known.keys,
                "replica": known.replicas,
            }[asked.group]
            thing = table.get(uuid.UUID(value)) if value else None
            title = str(thing) if thing else (value[:8] if value else _("none"))
            condition = f"{asked.group}:{value}" if value else ""
        case "cached":
            title = _("cached") if value == "cached" else _("nothing cached")
            condition = "cached>0" if value == "cached" else "cached=0"
        case "outcome":
            condition = f"status:{value}"
        case _:
            condition = f"{asked.group}:{filters.quote(value)}" if value else ""
    narrowed = " ".join(filter(None, [filters.unparse(asked.conditions), condition]))
    return {"title": title, "layer": layer, "group": group, "q": narrowed if condition else ""}


def _ticks(longest_us: int) -> list[str]:
    """Five labels of a small scale."""
    unit, divisor = ("s", 1e6) if longest_us >= 2_000_000 else ("ms", 1e3)
    digits = 0 if longest_us / divisor >= 20 else 1
    labels = [f"{longest_us * n / 4 / divisor:.{digits}f}" for n in range(5)]
    return ["0", *labels[1:4], f"{labels[4]} {unit}"] if longest_us else []


# ---------------------------------------------------------------------------------------------------------------
# Export

_COLUMNS = (
    "id", "started_at", "tenant", "key", "source", "endpoint", "model", "stream", "outcome", "status", "code",
    "finish_reason", "replica", "device", "attempts", "prompt_tokens", "cached_tokens", "completion_tokens",
    "duration_us", "ttft_us", "itl_p50_us", "itl_p99_us", "itl_max_us", "gateway_us", "queue_us", "engine_queue_us",
    "prefill_us", "decode_us", "unattributed_us", "preemptions", "role", "retries", "currency", "cost",
    "requests",
    "client_request_id", "trace_id", "gateway_version", "snapshot_version", "engine_version",
)  # fmt: skip


@require_GET
def export(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """The same list as CSV, streamed in pages, at most EXPORT_CAP rows."""
    asked = Asked(request, scope_of(request.user))
    if asked.error:
        return HttpResponse(asked.error, status=400, content_type="text/plain; charset=utf-8")
    lines = _csv(asked)
    content = _apart(lines) if isinstance(request, ASGIRequest) else lines
    response = StreamingHttpResponse(content, content_type="text/csv; charset=utf-8")
    stamp = f"{timezone.localtime(asked.window.end):%Y%m%d-%H%M}"
    response["Content-Disposition"] = f'attachment; filename="requests-{stamp}.csv"'
    response["X-Accel-Buffering"] = "no"
    return response


def _csv(asked: Asked) -> Iterator[bytes]:
    yield _lines([_COLUMNS])
    for rows in queries.export(asked.scope, asked.window, asked.resolved):
        known = names.of(rows, asked.scope)
        yield _lines(_cells(row, known, asked.zone) for row in rows)


async def _apart(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each page is read on a thread, while the loop serves on."""
    while (chunk := await sync_to_async(_next, thread_sensitive=False)(lines)) is not None:
        yield chunk


def _next(lines: Iterator[bytes]) -> bytes | None:
    try:
        return next(lines, None)
    finally:
        connections.close_all()


def _cells(row: RequestRecord, known: names.Names, zone: tzinfo) -> list[str]:
    special: dict[str, Callable[[], str]] = {
        "started_at": lambda: row.started_at.astimezone(zone).isoformat(timespec="milliseconds"),
        "tenant": lambda: known.tenants[row.tenant_id].name if row.tenant_id in known.tenants else "",
        "key": lambda: known.keys[row.key_id].name if row.key_id in known.keys else "",
        "cost": lambda: told(row.cost),
        "replica": lambda: str(known.replicas.get(row.replica_id, "")),
        "stream": lambda: "yes" if row.stream else "no",
    }
    return [_safe(special[c]() if c in special else getattr(row, c)) for c in _COLUMNS]


def _safe(value: Any) -> str:
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _lines(rows: Any) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue().encode()


# ---------------------------------------------------------------------------------------------------------------
# One request


@require_GET
def request_detail(request: HttpRequest, request_id: uuid.UUID) -> HttpResponse:
    """Everything about one request; while it is not delivered yet, a page that waits for it."""
    scope = scope_of(request.user)
    try:
        with queries.reading():
            row = queries.record(scope, request_id)
            if row is None:
                return _not_yet(request, request_id)
            context = _detail(request, scope, row)
    except queries.TooSlow:
        return too_slow(request)
    response = render(request, "telemetry/request.html", context)
    if _is_partial(request):  # the waiting page asks whether it is there now
        response.headers["HX-Refresh"] = "true"
    return response


@never_cache
@require_POST
def open_content(request: HttpRequest, request_id: uuid.UUID) -> HttpResponse:
    """The words of a request, where its tenant keeps them. By POST: each opening is an entry of the audit log."""
    row = queries.record(scope_of(request.user), request_id)
    if row is None:
        raise Http404
    try:
        body = content.opened(actor_of(request), row)
    except ConsoleError as error:
        messages.error(request, str(error))
        return redirect("request", request_id=request_id)
    sections = [(_("Prompt"), body["prompt"], body["left_out"]), (_("Answer"), body["answer"], 0)]
    return render(request, "telemetry/content.html", {"row": row, "sections": sections})


def _not_yet(request: HttpRequest, request_id: uuid.UUID) -> HttpResponse:
    """A fresh id may still be running. One that was delivered to somebody else is nothing to this reader."""
    at = windows.stamp(request_id)
    now = datetime.now(UTC)
    if at is None or not now - _STILL_POSSIBLE < at < now + timedelta(minutes=5) or queries.exists(request_id):
        raise Http404
    return render(request, "telemetry/pending.html", {"request_id": request_id, "at": at})


def _detail(request: HttpRequest, scope: Scope, row: RequestRecord) -> dict[str, Any]:
    body = queries.detail(row)
    origin = round(row.started_at.timestamp() * 1e6)
    told = [engine_spans.drawn(span, origin) for span in queries.engine_spans(row)]
    drawn = trace.build(row, body, told)
    known = names.of([row], scope)
    older, newer = queries.neighbours(scope, row)
    found = trace.events(body)
    around = Window(row.started_at - timedelta(minutes=1), row.started_at + timedelta(minutes=1), "custom")
    return {
        "row": row,
        "body": body,
        "content": content.held(actor_of(request), row),
        "trace": drawn,
        "tenant": known.tenants.get(row.tenant_id),
        "key": known.keys.get(row.key_id),
        "replica": known.replicas.get(row.replica_id),
        "older": older,
        "newer": newer,
        "rank": queries.rank(scope, row),
        "sentences": trace.verdict(row, drawn, body) if drawn.rows else [],
        "events": [(event, row.started_at + timedelta(microseconds=event.t)) for event in found],
        "marks": [[e.t, trace.event_title(e.name)] for e in found if e.source == "engine" and e.name != "chunk"][:24],
        "engine_events": sum(1 for e in found if e.source == "engine"),
        "blocks": trace.blocks(row, body),
        "gaps": trace.gaps(body),
        "bill": bill_of(row.id),
        "computed": trace.computed_tokens(row, body),
        "candidates": _candidates(body),
        "decision": body.get("decision", {}),
        "params": body.get("params", {}),
        "attempts": body.get("attempts", []),
        "advice": trace.advice(row.code, row.status, row.outcome) if row.outcome != "ok" else "",
        "speed": _speed(row),
        "curl": _curl(row, body),
        "python": _python(row, body),
        "replay": _replay(row, body),
        "around": f"{reverse('requests')}?{around.query}&{urlencode({'q': f'replica:{row.replica_id}'})}",
    }


def _candidates(body: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = list(body.get("candidates", []))
    scores = [c["score"] for c in rows if isinstance(c.get("score"), int | float)]
    top = max(scores, default=0)
    return [
        {
            **c,
            "chosen": c.get("verdict") == "chosen",
            "share": c["score"] / top if top and isinstance(c.get("score"), int | float) else 0.0,
        }
        for c in rows
    ]


def _speed(row: RequestRecord) -> float | None:
    """Tokens a second after the first one."""
    if row.ttft_us is None or row.completion_tokens < 2 or row.duration_us <= row.ttft_us:
        return None
    return (row.completion_tokens - 1) / ((row.duration_us - row.ttft_us) / 1e6)


_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "…"}]}
# Endpoint of a record -> the path to ask again, and what stands for the content. Messages and Responses are shown as
# the chat that they were made into: their parameters were kept so.
_AGAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", _CHAT),
    "messages": ("chat/completions", _CHAT),
    "responses": ("chat/completions", _CHAT),
    "completions": ("completions", {"prompt": "…"}),
    "embeddings": ("embeddings", {"input": "…"}),
    "tokenize": ("tokenize", {"prompt": "…"}),
    "detokenize": ("detokenize", {"tokens": []}),
    "count_tokens": ("messages/count_tokens", _CHAT),
}
_OF_OPENAI = ("chat/completions", "completions", "embeddings")  # paths that its client has a method for


def _sent(row: RequestRecord, body: dict[str, Any]) -> dict[str, Any]:
    """The request without its content, which is not kept."""
    path, content = _AGAIN[row.endpoint]
    sent = {"model": row.model, **content, **_kept_params(body)}
    if path in ("chat/completions", "completions"):
        return {**sent, "stream": row.stream}
    return {name: value for name, value in sent.items() if name not in ("stream", "inputs")}


def _kept_params(body: dict[str, Any]) -> dict[str, Any]:
    """The parameters that were kept as they were sent."""
    return {name: value for name, value in body.get("params", {}).items() if name not in SUMMARISED}


def _path(row: RequestRecord) -> str:
    return _AGAIN[row.endpoint][0]


def _curl(row: RequestRecord, body: dict[str, Any]) -> str:
    sent = trace.as_json(_sent(row, body)).replace("'", "'\\''")
    return (
        f"curl {settings.PUBLIC_URL}/v1/{_path(row)} \\\n"
        '  -H "Authorization: Bearer $FANLIGHT_KEY" -H "Content-Type: application/json" \\\n'
        f"  -d '{sent}'"
    )


def _python(row: RequestRecord, body: dict[str, Any]) -> str:
    openai_names = {
        "messages",
        "prompt",
        "input",
        "dimensions",
        "encoding_format",
        "model",
        "stream",
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "seed",
        "stop",
        "n",
        "frequency_penalty",
        "presence_penalty",
        "logprobs",
        "top_logprobs",
        "logit_bias",
    }
    sent, path = _sent(row, body), _path(row)
    extra = {k: v for k, v in sent.items() if k not in openai_names}
    lines = [f"    {k}={v!r}," for k, v in sent.items() if k in openai_names]
    if extra:
        lines.append(f"    extra_body={extra!r},")
    call = f"{path.replace('/', '.')}.create("
    if path not in _OF_OPENAI:
        call, lines = "post(", [f'    "/{path}",', "    cast_to=object,", f"    body={sent!r},"]
    return "\n".join(
        [
            "import os",
            "from openai import OpenAI",
            "",
            f'client = OpenAI(base_url="{settings.PUBLIC_URL}/v1", api_key=os.environ["FANLIGHT_KEY"])',
            f"answer = client.{call}",
            *lines,
            ")",
        ]
    )


def _replay(row: RequestRecord, body: dict[str, Any]) -> str:
    known = {k: str(v) for k, v in _kept_params(body).items() if k in PARAMS and isinstance(v, int | float | str)}
    return f"{reverse('playground')}?{urlencode({'model': row.model, **known})}"


def _uuid(text: str | None) -> uuid.UUID | None:
    try:
        return uuid.UUID(text) if text else None
    except ValueError:
        return None
