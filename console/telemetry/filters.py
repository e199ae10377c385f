"""The filter language of the requests page: `model:smollm2 status:ok ttft>800ms cached=0`, pure and tested.

    filter     = condition*
    condition  = ["-"] field ":" value ("," value)*        one of the values; "-" turns it round
               | ["-"] field ("=" | ">" | ">=" | "<" | "<=") number [unit]
               | request id                                 a bare UUID

Values with spaces stand in double quotes. `parse` raises BadFilter, which names the word and says what would do.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from django.utils.translation import gettext as _

OUTCOMES = ("ok", "cancelled", "error", "timeout", "rejected", "slow_reader", "gateway_lost")
LAYERS = ("gateway", "queue", "engine_queue", "prefill", "decode", "unattributed")

WORDS = {
    "model": "model",
    "route": "model",
    "status": "outcome",
    "outcome": "outcome",
    "tenant": "tenant",
    "key": "key",
    "replica": "replica",
    "device": "device",
    "source": "source",
    "endpoint": "endpoint",
    "code": "code",
    "finish": "finish_reason",
    "stream": "stream",
    "user": "end_user",
    "trace": "trace_id",
    "client_id": "client_request_id",
    "layer": "layer",
    "role": "role",
}
DURATIONS = {
    "ttft": "ttft_us",
    "total": "duration_us",
    "duration": "duration_us",
    "itl": "itl_p99_us",
    "itl_max": "itl_max_us",
    "gateway": "gateway_us",
    "queue": "queue_us",
    "engine_queue": "engine_queue_us",
    "prefill": "prefill_us",
    "decode": "decode_us",
    "unattributed": "unattributed_us",
}
COUNTS = {
    "tokens": "tokens",
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "output": "completion_tokens",
    "preempted": "preemptions",
    "attempts": "attempts",
    "retries": "retries",
}
_UNITS_US = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6, "min": 60e6}
_UNITS_COUNT = {"": 1.0, "k": 1e3, "m": 1e6}
_LARGEST = 2**53

_TOKEN = re.compile(r'(?:[^\s"]|"[^"]*"?)+')
_CONDITION = re.compile(r"(?P<not>-?)(?P<field>[a-z_]+)(?P<op>:|>=|<=|>|<|=)(?P<value>.*)", re.S)
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµ]*)")


class BadFilter(ValueError):
    """A condition cannot be read. `word` is the part of the filter that is wrong."""

    def __init__(self, word: str, message: str) -> None:
        super().__init__(message)
        self.word = word


@dataclass(frozen=True)
class Condition:
    """One condition. `field` is a column of RequestRecord, or tenant, key, replica, layer, tokens."""

    field: str
    op: str  # "in" for words; "=", ">", ">=", "<", "<=" for numbers
    values: tuple[str, ...] = ()
    number: int = 0
    negated: bool = False
    text: str = ""  # as written, in the canonical form that `unparse` gives

    @property
    def name(self) -> str:
        """The part before the value, as shown in a token."""
        return _CONDITION.fullmatch(self.text).group("field", "op") if self.text else ("", "")  # type: ignore[union-attr,return-value]


def parse(text: str) -> tuple[Condition, ...]:
    """Read a filter. Raises BadFilter."""
    return tuple(_condition(word) for word in _TOKEN.findall(text.strip()))


def unparse(conditions: Iterable[Condition]) -> str:
    """Write a filter so that parsing it gives the same conditions."""
    return " ".join(condition.text for condition in conditions)


def quote(value: str) -> str:
    """A value as it must stand in a filter."""
    return f'"{value}"' if re.search(r'[\s,"]', value) or not value else value


def _condition(word: str) -> Condition:
    bare = _as_uuid(word)
    if bare is not None:
        return Condition("id", "in", (str(bare),), text=str(bare))
    match = _CONDITION.fullmatch(word)
    if match is None:
        raise BadFilter(
            word,
            _("“%(word)s” is no condition. Write field:value or field>number, for example status:error or ttft>800ms.")
            % {"word": word},
        )
    field, op, value = match["field"], match["op"], match["value"]
    negated = match["not"] == "-"
    if field in WORDS and op in {":", "="}:
        return _words(word, field, value, negated)
    if field in WORDS:
        raise BadFilter(
            word,
            _("“%(field)s” is compared with “:”, for example %(field)s:value.") % {"field": field},
        )
    if field in DURATIONS:
        return _number(word, field, DURATIONS[field], op, _microseconds(word, field, value), negated)
    if field in COUNTS:
        return _number(word, field, COUNTS[field], op, _count(word, field, value), negated)
    known = ", ".join(sorted({*WORDS, *DURATIONS, *COUNTS}))
    raise BadFilter(
        word,
        _("There is no field “%(field)s”. There are: %(known)s.") % {"field": field, "known": known},
    )


def _words(word: str, field: str, value: str, negated: bool) -> Condition:
    values = tuple(part for part in _split(value) if part)
    if not values:
        raise BadFilter(word, _("“%(field)s:” needs a value.") % {"field": field})
    column = WORDS[field]
    if column == "outcome":
        bad = [v for v in values if v not in OUTCOMES and not re.fullmatch(r"[1-5]\d\d", v)]
        if bad:
            raise BadFilter(
                word,
                _("“%(value)s” is neither an outcome nor an HTTP status. Outcomes are: %(known)s.")
                % {"value": bad[0], "known": ", ".join(OUTCOMES)},
            )
    if column == "layer" and any(v not in LAYERS for v in values):
        raise BadFilter(word, _("Layers are: %(known)s.") % {"known": ", ".join(LAYERS)})
    if column == "stream" and any(v not in {"yes", "no"} for v in values):
        raise BadFilter(word, _("“stream:” is yes or no."))
    text = f"{'-' if negated else ''}{field}:{','.join(quote(v) for v in values)}"
    return Condition(column, "in", values, negated=negated, text=text)


def _number(word: str, field: str, column: str, op: str, number: int, negated: bool) -> Condition:
    sign = "=" if op == ":" else op
    if number > _LARGEST:
        raise BadFilter(word, _("%(word)s: the number is too large.") % {"word": word})
    unit = _unit(number) if field in DURATIONS else str(number)
    text = f"{'-' if negated else ''}{field}{sign}{unit}"
    return Condition(column, sign, number=number, negated=negated, text=text)


def _microseconds(word: str, field: str, value: str) -> int:
    match = _NUMBER.fullmatch(value.strip().lower())
    if match is None or (match[2] not in _UNITS_US and match[2] != ""):
        raise BadFilter(
            word,
            _("“%(field)s” needs a duration, for example %(field)s>800ms or %(field)s<2s.") % {"field": field},
        )
    return round(float(match[1]) * _UNITS_US[match[2] or "ms"])


def _count(word: str, field: str, value: str) -> int:
    match = _NUMBER.fullmatch(value.strip().lower())
    if match is None or match[2] not in _UNITS_COUNT:
        raise BadFilter(word, _("“%(field)s” needs a number, for example %(field)s>4k.") % {"field": field})
    return round(float(match[1]) * _UNITS_COUNT[match[2]])


def _unit(us: int) -> str:
    """Microseconds in the largest unit that keeps them whole."""
    for unit, size in (("s", 1_000_000), ("ms", 1_000)):
        if us % size == 0 and us:
            return f"{us // size}{unit}"
    return f"{us}us"


def _split(value: str) -> list[str]:
    parts = re.findall(r'"([^"]*)"?|([^,"]+)', value)
    return [quoted or plain for quoted, plain in parts]


def _as_uuid(word: str) -> uuid.UUID | None:
    if not re.fullmatch(r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}", word):
        return None
    return uuid.UUID(word)
