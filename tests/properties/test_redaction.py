"""What matches never survives, and nothing else is touched."""

from __future__ import annotations

import string
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import apikey, redaction
from serving.redaction import MARGIN, PASSES, redacted

SECRETS = {
    "sk-proj-abcDEF0123456789abcDEF": "API key",
    apikey.generate(): "API key",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a": "API key",
    "AKIAIOSFODNN7EXAMPLE": "API key",
    "Bearer mF_9.B5f-4.1JqM0000": "token",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----": "private key",
    "ada.lovelace+bills@mail.example.co.uk": "e-mail address",
    "4111111111111111": "card number",
    "4111 1111 1111 1111": "card number",
    "3782-822463-10005": "card number",
    "DE89370400440532013000": "IBAN",
    "GB82 WEST 1234 5698 7654 32": "IBAN",
}
PLAIN = st.text(alphabet=string.ascii_lowercase + " .,:;()\näß漢字\0", max_size=60)
SECRET = st.sampled_from(sorted(SECRETS))


@pytest.mark.parametrize(("secret", "kind"), SECRETS.items())
def test_each_kind_is_named_instead(secret: str, kind: str) -> None:
    assert redacted(f"before {secret}, after") == f"before [redacted {kind}], after"


@given(st.lists(st.tuples(PLAIN, SECRET), max_size=6), PLAIN)
def test_secrets_go_and_the_text_around_them_stays(parts: list[tuple[str, str]], last: str) -> None:
    """Secrets stand in brackets of their own here, so that the text around has nothing of them."""
    text = "".join(f"{before} <{secret}> " for before, secret in parts) + last
    expected = "".join(f"{before} <[redacted {SECRETS[secret]}]> " for before, secret in parts) + last
    assert redacted(text) == expected


@given(PLAIN)
def test_other_text_is_unchanged(text: str) -> None:
    assert redacted(text) == text


@given(st.text(), SECRET, st.text())
def test_nothing_is_left_to_find_whatever_stands_around(before: str, secret: str, after: str) -> None:
    once = redacted(f"{before} {secret} {after}")
    assert secret not in once
    assert redacted(once) == once


@given(st.lists(st.one_of(SECRET, st.text(alphabet="0123456789 -ABEDGs@.k_fl\n", max_size=30))))
def test_hostile_neighbours_hide_nothing(parts: list[str]) -> None:
    once = redacted("".join(parts))
    assert redacted(once) == once


@given(SECRET, st.integers(0, 100))
def test_no_part_of_a_secret_is_left_at_an_end(secret: str, inside: int) -> None:
    end = 10 + inside % len(secret)
    whole = f"{'x' * 9} {secret} {'y' * MARGIN}"
    assert redacted(whole[: end + MARGIN], end) in (f"{'x' * 9} [redacted {SECRETS[secret]}]", f"{'x' * 9} ")


@pytest.mark.parametrize(
    "text",
    [
        "task-management, risk-assessment-of-the-whole-department",
        "order 4111111111111112, phone 030 1234567, 2026-11-30 05:54:21",
        "pk_user and sk-learn; a@b; @team; DE89370400440532013001",
        "0123456789012345678901234567890123456789",
    ],
)
def test_what_only_looks_like_one_stays(text: str) -> None:
    assert redacted(text) == text


def test_a_private_key_without_an_end_goes_to_the_last_character() -> None:
    assert redacted("key: -----BEGIN PRIVATE KEY-----\nMIIEvQ\n") == "key: [redacted private key]"


def test_text_that_hides_secrets_behind_each_other_is_looked_at_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each number hides the next: without a bound a gateway would stand still for seconds over 32 KB of them."""
    looks: list[str] = []
    found = redaction._found

    def counted(text: str) -> Iterator[redaction.Span]:
        looks.append(text)
        return found(text)

    monkeypatch.setattr(redaction, "_found", counted)
    assert redacted("NO9386011117947" * 100) == "[redacted text]"
    assert len(looks) == PASSES


def test_a_beginning_of_a_web_token_is_one_too() -> None:
    assert redacted("it is eyJhbGciOiJIUzI1NiJ9, so far") == "it is [redacted API key], so far"
