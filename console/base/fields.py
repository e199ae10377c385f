"""Checks of values from people: each takes what a form, a command or JSON gave, and returns the value or says why not.

The same tables serve pages, commands and the API, so that a value is refused everywhere in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from console.errors import Refused

Check = Callable[[Any], Any]
"""From the given value to the one that is kept; raises ValueError with a sentence."""


def checked(table: Mapping[str, Check], values: Mapping[str, Any]) -> dict[str, Any]:
    """Every value through its check. Raises Refused, naming the field, for one that is unknown or cannot be used."""
    found = {}
    for name, value in values.items():
        check = table.get(name)
        if check is None:
            raise Refused(f"{name} is not a field here. Known: {', '.join(sorted(table))}.", name)
        try:
            found[name] = check(value)
        except ValueError as error:
            raise Refused(f"{name} {error}.", name) from None
    return found


def optional(check: Check) -> Check:
    """None and the empty text mean: none."""
    return lambda value: None if value is None or value == "" else check(value)


def whole(low: int, high: int) -> Check:
    """A whole number within bounds."""

    def check(value: Any) -> int:
        number = _number(value)
        if number != number.to_integral_value() or not low <= number <= high:
            raise ValueError(f"must be a whole number from {low:,} to {high:,}")
        return int(number)

    return check


def number(low: float, high: float) -> Check:
    """A number within bounds."""

    def check(value: Any) -> float:
        found = float(_number(value))
        if not low <= found <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return found

    return check


def money(high: int, places: int) -> Check:
    """An amount from 0 to `high` with at most `places` decimals, exact."""

    def check(value: Any) -> Decimal:
        amount = _number(value)
        if not 0 <= amount <= high:
            raise ValueError(f"must be an amount from 0 to {high:,}")
        if amount != round(amount, places):
            raise ValueError(f"must have at most {places} decimals")
        return round(amount, places)

    return check


def choice(values: Iterable[str]) -> Check:
    """One of the given words."""
    known = tuple(values)

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError("must be one of " + ", ".join(word or "(empty)" for word in known))
        return value

    return check


def flag(value: Any) -> bool:
    """True or false; from forms and commands as words."""
    known = {True: True, False: False, "true": True, "false": False, "on": True, "yes": True, "no": False, "": False}
    if not isinstance(value, bool | str) or value not in known:
        raise ValueError("must be true or false")
    return known[value]


def text(longest: int, shortest: int = 1) -> Check:
    """Text without surrounding blanks and control characters, of a bounded length."""

    def check(value: Any) -> str:
        found = value.strip() if isinstance(value, str) else ""
        if not shortest <= len(found) <= longest or not found.isprintable():
            raise ValueError(f"must be text of {shortest} to {longest} characters")
        return found

    return check


def moment(value: Any) -> datetime:
    """A point in time by ISO 8601; without an offset it is UTC."""
    if isinstance(value, datetime):
        found = value
    else:
        try:
            found = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            raise ValueError("must be an ISO 8601 time, such as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def told(value: Any) -> Any:
    """A kept value for JSON; amounts as text, so that no digit is lost on the way."""
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return value.isoformat() if isinstance(value, datetime) else value


def plain_number(value: Any) -> Any:
    """JSON's numbers with decimals come exact, and engines take floats; None for one of a size that nothing has."""
    if isinstance(value, Decimal) and abs(value.adjusted()) > 30:
        return None  # writing it out would take its zeros
    return float(value) if isinstance(value, Decimal) else value


def _number(value: Any) -> Decimal:
    """Decimal, never by way of a float's binary form; True is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str) or len(str(value)) > 40:
        raise ValueError("must be a number")
    try:
        found = Decimal(str(value).strip())
    except InvalidOperation:
        raise ValueError("must be a number") from None
    if not found.is_finite() or abs(found.adjusted()) > 30:
        raise ValueError("must be a number of ordinary size")
    return found
