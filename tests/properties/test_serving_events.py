"""However an event stream is cut into reads, the same payloads come out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.upstream import EventParser

payloads = st.lists(
    st.text(
        st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)),
        min_size=1,
        max_size=20,
    ).map(str.encode),
    max_size=8,
)


@given(payloads, st.sampled_from([b"\n", b"\r\n"]), st.randoms(use_true_random=False), st.booleans())
def test_any_cut_gives_the_same_payloads(sent: list[bytes], newline: bytes, dice: object, comments: bool) -> None:
    data = b""
    for payload in sent:
        if comments:
            data += b": ping" + newline + newline
        data += b"data: " + payload + newline + newline
    parser, got, at = EventParser(), [], 0
    while at < len(data):
        step = dice.randint(1, 9)  # type: ignore[attr-defined]
        got += parser.feed(data[at : at + step])
        at += step
    assert got == sent
