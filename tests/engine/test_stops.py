"""Stop strings never leak, however the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.stops import StopFilter

words = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=3), max_size=20), st.lists(words, max_size=4))
def test_the_shown_text_is_cut_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    """Whatever the cut, the answer ends where the earliest completed stop string begins."""
    stop_filter = StopFilter(tuple(stops))
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        shown += stop_filter.push(piece)
        assert not any(stop in shown for stop in stops)
        if stop_filter.matched:
            break
    found = [at for stop in stops if (at := seen.find(stop)) >= 0]
    assert stop_filter.matched == bool(found)
    if found:
        assert shown == seen[: min(found)]
        assert stop_filter.push("more") == stop_filter.flush() == ""
    else:
        assert shown + stop_filter.flush() == seen


def test_only_what_may_become_a_stop_is_held_back() -> None:
    stop_filter = StopFilter(("END",))
    assert stop_filter.push("fine E") == "fine "
    assert stop_filter.push("x") == "Ex"
    assert stop_filter.push("EN") == ""
    assert stop_filter.flush() == "EN"
