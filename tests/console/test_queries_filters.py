"""The filter language and time windows: pure."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.telemetry import filters, windows
from console.telemetry.filters import BadFilter

NOW = datetime(2026, 11, 24, 14, 36, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "field", "op", "number"),
    [
        ("ttft>800ms", "ttft_us", ">", 800_000),
        ("ttft>=0.5s", "ttft_us", ">=", 500_000),
        ("total<2s", "duration_us", "<", 2_000_000),
        ("queue>10", "queue_us", ">", 10_000),  # no unit: milliseconds
        ("itl>250us", "itl_p99_us", ">", 250),
        ("cached=0", "cached_tokens", "=", 0),
        ("cached:0", "cached_tokens", "=", 0),
        ("tokens>4k", "tokens", ">", 4000),
        ("prompt<=1.5k", "prompt_tokens", "<=", 1500),
        ("preempted>0", "preemptions", ">", 0),
    ],
)
def test_numbers_are_read_with_their_units(text: str, field: str, op: str, number: int) -> None:
    (condition,) = filters.parse(text)
    assert (condition.field, condition.op, condition.number) == (field, op, number)


def test_words_take_lists_quotes_and_negation() -> None:
    model, outcome, tenant = filters.parse('model:a,b -status:ok tenant:"Aurora Support"')
    assert model.values == ("a", "b")
    assert outcome.field == "outcome" and outcome.negated and outcome.values == ("ok",)
    assert tenant.values == ("Aurora Support",)


def test_a_bare_request_id_is_a_condition() -> None:
    made = uuid.uuid4()
    (condition,) = filters.parse(f"  {made} ")
    assert (condition.field, condition.values) == ("id", (str(made),))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "field:value"),
        ("foo:1", "There are: "),
        ("ttft>fast", "duration"),
        ("ttft>8 ms", "duration|no condition"),
        ("cached>many", "number"),
        ("status:nice", "Outcomes are"),
        ("model>3", "compared with"),
        ("model:", "needs a value"),
        ("layer:decoder", "Layers are"),
        ("stream:perhaps", "yes or no"),
        ("tokens>99999999999999999999", "too large"),
        ("ttft>1e9s", "duration"),
        ("; DROP TABLE x", "no condition"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_would_do(text: str, says: str) -> None:
    with pytest.raises(BadFilter, match=says) as caught:
        filters.parse(text)
    assert caught.value.word in text


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_never_worse(text: str) -> None:
    try:
        conditions = filters.parse(text)
    except BadFilter as error:
        assert str(error)
    else:
        assert filters.parse(filters.unparse(conditions)) == conditions


WORD_FIELDS = sorted(f for f, c in filters.WORDS.items() if c not in {"outcome", "layer", "stream"})
words = st.builds(
    lambda field, values, no: f"{'-' if no else ''}{field}:{','.join(filters.quote(v) for v in values)}",
    st.sampled_from(WORD_FIELDS),
    st.lists(
        st.text(
            st.characters(blacklist_characters='"', blacklist_categories=("Cs", "Cc", "Z")), min_size=1, max_size=8
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
numbers = st.builds(
    lambda field, op, n: f"{field}{op}{n}us" if field in filters.DURATIONS else f"{field}{op}{n}",
    st.sampled_from(sorted({*filters.DURATIONS, *filters.COUNTS})),
    st.sampled_from(["=", ">", ">=", "<", "<="]),
    st.integers(0, 10**12),
)


@given(st.lists(st.one_of(words, numbers), max_size=5))
def test_writing_and_reading_gives_the_same_conditions(parts: list[str]) -> None:
    conditions = filters.parse(" ".join(parts))
    assert len(conditions) == len(parts)
    assert filters.parse(filters.unparse(conditions)) == conditions


@pytest.mark.parametrize("key", list(windows.RANGES))
def test_each_range_ends_now_and_has_a_readable_number_of_bars(key: str) -> None:
    window = windows.latest(key, NOW)
    assert window.end == NOW and window.end - window.start == windows.RANGES[key]
    assert 60 <= window.seconds / window.bucket_s <= 96


def test_custom_times_are_read_in_the_viewers_zone() -> None:
    window = windows.parse("", "2026-11-24T14:00", "2026-11-24T15:00", ZoneInfo("Europe/Stockholm"), NOW)
    assert window.key == "custom" and window.start == datetime(2026, 11, 24, 13, tzinfo=UTC)


@pytest.mark.parametrize(
    ("start", "end", "problem"),
    [
        ("yesterday", "", "bad-time"),
        ("2026-11-24T15:00", "2026-11-24T14:00", "empty"),
        ("2020-01-01", "2026-11-24", "too-long"),
    ],
)
def test_a_window_that_cannot_be_says_why_and_stays_bounded(start: str, end: str, problem: str) -> None:
    window = windows.parse("", start, end, UTC, NOW)
    assert window.problem == problem
    assert timedelta(0) < window.end - window.start <= windows.LONGEST


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_no_url_makes_an_unbounded_window(key: str, start: str, end: str) -> None:
    window = windows.parse(key, start, end, UTC, NOW)
    assert timedelta(0) < window.end - window.start <= windows.LONGEST


def test_the_time_in_a_request_id() -> None:
    at = datetime(2026, 11, 24, 14, 32, 7, 412_000, tzinfo=UTC)
    made = uuid.UUID(int=(int(at.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62))
    assert windows.stamp(made) == at
    assert windows.stamp(uuid.uuid4()) is None
    assert windows.stamp(uuid.UUID(int=(2**48 - 1) << 80 | 7 << 76 | 2 << 62)) is None
