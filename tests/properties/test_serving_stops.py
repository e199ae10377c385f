"""However text is cut into chunks, a stop filter shows the same and never more than may be shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.stops import StopFilter

# few letters, so that stops nearly match all the time
letters = st.sampled_from("aab🙂é")
texts = st.lists(st.text(letters, max_size=6), max_size=12)
stops = st.lists(st.text(letters, min_size=1, max_size=4), min_size=1, max_size=4)


def shown(chunks: list[str], strings: list[str]) -> tuple[str, str | None]:
    stop = StopFilter(strings)
    out = "".join(stop.feed(chunk) for chunk in chunks)
    return (out if stop.matched is not None else out + stop.flush()), stop.matched


@given(texts, stops)
def test_the_cut_into_chunks_does_not_matter(chunks: list[str], strings: list[str]) -> None:
    whole = "".join(chunks)
    assert shown(chunks, strings) == shown([whole], strings) == shown(list(whole), strings)


@given(texts, stops)
def test_no_stop_string_is_ever_shown(chunks: list[str], strings: list[str]) -> None:
    out, _ = shown(chunks, strings)
    assert not any(string in out for string in strings)


@given(texts, stops)
def test_what_is_shown_is_the_text_up_to_the_match_or_all_of_it(chunks: list[str], strings: list[str]) -> None:
    whole = "".join(chunks)
    out, matched = shown(chunks, strings)
    assert whole.startswith(out if matched is None else out + matched)
    assert matched is not None or out == whole


@given(texts, stops)
def test_no_more_is_held_back_than_could_become_a_stop(chunks: list[str], strings: list[str]) -> None:
    stop, fed, out = StopFilter(strings), "", ""
    for chunk in chunks:
        fed += chunk
        out += stop.feed(chunk)
        if stop.matched is None:
            held = fed[len(out) :]
            assert held == "" or any(string.startswith(held) and string != held for string in strings)
