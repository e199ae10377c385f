"""Checks of values from people, the same for pages, commands and the API."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.base.fields import checked, choice, flag, moment, money, number, optional, text, told, whole
from console.errors import Refused

TABLE = {
    "whole": whole(0, 10), "number": number(0.5, 2), "money": money(9_000_000, 9), "choice": choice(("a", "b")),
    "flag": flag, "text": text(5), "moment": moment, "maybe": optional(whole(1, 3)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("whole", "7", 7), ("whole", 7, 7), ("whole", 7.0, 7), ("number", "1.5", 1.5),
        ("money", "0.000000001", Decimal("1E-9")),
        ("money", 0.1, Decimal("0.1")), ("choice", "a", "a"), ("flag", "yes", True), ("flag", False, False),
        ("text", " ab ", "ab"),
        ("moment", "2026-01-31T12:00:00", datetime(2026, 1, 31, 12, tzinfo=UTC)), ("maybe", None, None),
        ("maybe", "", None),
    ],
)  # fmt: skip
def test_a_value_is_kept_exactly(name: str, value: Any, kept: Any) -> None:
    assert checked(TABLE, {name: value}) == {name: kept}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("whole", 11), ("whole", -1), ("whole", 1.5), ("whole", True), ("whole", "x"), ("whole", None),
        ("whole", "NaN"),
        ("whole", "1e99999"), ("number", float("inf")), ("money", "0.0000000001"), ("money", -1), ("money", 9_000_001),
        ("money", "1" * 50), ("choice", "c"), ("choice", ["a"]), ("flag", 1), ("flag", "maybe"),
        ("flag", []), ("text", ""),
        ("text", "abcdef"), ("text", 3), ("moment", "yesterday"), ("moment", 3), ("maybe", 4), ("unknown", 1),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(Refused) as caught:
        checked(TABLE, {name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(name)


@given(st.sampled_from(sorted(TABLE)), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_no_value_whatever_raises_anything_else(name: str, value: Any) -> None:
    try:
        checked(TABLE, {name: value})
    except Refused as error:
        assert error.field == name


@given(st.decimals(0, 9_000_000, places=9))
def test_money_comes_back_to_the_last_digit(amount: Decimal) -> None:
    (kept,) = checked(TABLE, {"money": told(amount)}).values()
    assert kept == amount
