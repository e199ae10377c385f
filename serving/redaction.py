"""Take secrets and personal numbers out of text before anybody keeps it. Pure functions.

API keys by the prefixes of their makers, bearer tokens, private keys, e-mail addresses, card numbers (Luhn's digit is
right) and IBANs (ISO 7064's remainder is right). What has no form of its own, such as a name, stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MARGIN = 1024
"""Characters read past an end, so that a secret which lies across it is known; a longer one is cut where it began."""

PASSES = 4
"""How often text is looked at for what was hidden behind a find. Text that hides more was made to: none of it stays."""

_KEYS = (
    r"(?:sk|fl|gsk|xai|glpat|pypi)[-_][A-Za-z0-9_-]{16,}",
    r"(?:pk|rk|hf|npm)_(?:live_|test_)?[A-Za-z0-9]{20,}",
    r"(?:gh[pousr]|github_pat)_[A-Za-z0-9_]{20,}",
    r"xox[a-z]-[A-Za-z0-9-]{10,}",
    r"AIza[A-Za-z0-9_-]{30,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16,}",
    r"eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+){0,2}",  # its dots are optional: a search for them would look far ahead
)
_PRIVATE = r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)"
_SHAPES = (
    ("private key", re.compile(_PRIVATE)),
    ("API key", re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_KEYS)})")),
    ("token", re.compile(r"(?<![A-Za-z0-9])bearer\s{1,8}[A-Za-z0-9._~+/=-]{16,}", re.IGNORECASE | re.ASCII)),
)
_AT = re.compile(r"@(?:[\w-]+\.)+[^\W\d_]{2,}")
_LOCAL = re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]{1,64}\Z")
# Found from every start, not only behind the last match: a number in front must not hide the one that follows.
_CARD = re.compile(
    r"(?<![0-9])(?=([2-6][0-9]{12,18}|[2-6][0-9]{3}(?:([ -])[0-9]{4}){3}(?:\2[0-9]{1,3})?"
    r"|[2-6][0-9]{3}[ -][0-9]{6}[ -][0-9]{4,5})(?![0-9]))"
)
_FOUR_GROUPS = 19  # characters
_IBAN = re.compile(r"(?<![A-Za-z0-9])(?=([A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}))")

Span = tuple[int, int, str]


def redacted(text: str, end: int | None = None) -> str:
    """The text up to `end` with what is secret in it named instead; pass MARGIN more characters than `end`."""
    end = len(text) if end is None else end
    parts: list[str] = []
    at = 0
    for start, stop, kind in _merged(_spans(text)):
        if start >= end:
            break
        parts += (text[at:start], f"[redacted {kind}]")
        at = stop
    parts.append(text[at:end])
    return "".join(parts)


def _spans(text: str) -> list[Span]:
    """All that is secret. What was found is blanked and the rest looked at again: it may have hidden a beginning."""
    spans: list[Span] = []
    for _ in range(PASSES):
        found = list(_found(text))
        if not found:
            return spans
        spans += found
        pieces: list[str] = []
        at = 0
        for start, stop, _kind in _merged(found):
            pieces += (text[at:start], "\0" * (stop - start))
            at = stop
        text = "".join((*pieces, text[at:]))
    return [(0, len(text), "text")]


def _found(text: str) -> Iterator[Span]:
    for kind, shape in _SHAPES:
        for match in shape.finditer(text):
            yield match.start(), match.end(), kind
    for match in _AT.finditer(text):
        local = _LOCAL.search(text, max(match.start() - 64, 0), match.start())
        if local is not None:
            yield local.start(), match.end(), "e-mail address"
    for match in _CARD.finditer(text):
        for told in (match[1], match[1][:_FOUR_GROUPS]):  # a short group behind may be another number
            if _is_card(told):
                yield match.start(1), match.start(1) + len(told), "card number"
                break
    for match in _IBAN.finditer(text):
        length = _iban_length(match[1])
        if length:
            yield match.start(1), match.start(1) + length, "IBAN"


def _merged(spans: list[Span]) -> list[Span]:
    """In order, those that touch or overlap made one, under the name of the first."""
    merged: list[Span] = []
    for start, stop, kind in sorted(spans):
        if merged and start <= merged[-1][1]:
            before = merged[-1]
            merged[-1] = (before[0], max(before[1], stop), before[2])
        else:
            merged.append((start, stop, kind))
    return merged


def _is_card(text: str) -> bool:
    """Luhn's sum over the digits."""
    digits = [int(character) for character in text if character.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _iban_length(text: str) -> int:
    """Characters of the longest IBAN that the text begins with, 0 for none: 15 to 34 letters and digits count."""
    head = int("".join(str(int(character, 36)) for character in text[:4]))
    remainder = count = longest = 0
    for position, character in enumerate(text[4:], start=5):
        if character == " ":
            continue
        value = int(character, 36)
        remainder = (remainder * (100 if value > 9 else 10) + value) % 97
        count += 1
        if count >= 11 and (remainder * 1_000_000 + head) % 97 == 1:
            longest = position
    return longest
