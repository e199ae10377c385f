"""What is expected to be cached where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.prefixes import BLOCK, MAX_BLOCKS, MAX_REPLICAS, PrefixIndex

texts = st.lists(st.sampled_from(["a" * BLOCK, "b" * BLOCK, "c" * 100]), max_size=8).map("".join)


@given(texts, texts)
def test_the_common_beginning_in_whole_blocks_is_expected(one: str, two: str) -> None:
    index = PrefixIndex()
    index.note("r", "t", one)
    common = 0
    while one[common : common + BLOCK] == two[common : common + BLOCK] and len(two) - common >= BLOCK:
        common += BLOCK
    assert index.expected("t", two) == ({"r": common} if common else {})


@given(texts)
def test_tenants_share_nothing(text: str) -> None:
    index = PrefixIndex()
    index.note("r", "one", text)
    assert index.expected("two", text) == {}


def test_each_replica_by_its_own() -> None:
    index = PrefixIndex()
    index.note("long", "t", "x" * BLOCK * 4)
    index.note("short", "t", "x" * BLOCK * 2 + "y" * BLOCK * 2)
    assert index.expected("t", "x" * BLOCK * 3) == {"long": 3 * BLOCK, "short": 2 * BLOCK}


@given(st.lists(st.integers(0, 40), max_size=60))
def test_memory_is_bounded_and_the_latest_is_kept(prompts: list[int]) -> None:
    index = PrefixIndex(blocks_per_replica=16)
    for number in prompts:
        text = f"{number:{BLOCK}}" * 8
        index.note("r", "t", text)
        assert len(index) <= 16
        assert index.expected("t", text) == {"r": 8 * BLOCK}


def test_what_is_forgotten_first_is_the_end_of_the_oldest() -> None:
    index = PrefixIndex(blocks_per_replica=10)
    for letter in "ab":
        index.note("r", "t", letter * BLOCK * 6)
    assert index.expected("t", "a" * BLOCK * 6) == {"r": 4 * BLOCK}


def test_bounds_of_prompts_and_replicas() -> None:
    index = PrefixIndex()
    index.note("r", "t", "x" * BLOCK * (MAX_BLOCKS + 5))
    assert len(index) == MAX_BLOCKS
    for n in range(MAX_REPLICAS + 5):
        index.note(f"r{n}", "t", "y" * BLOCK)
    assert len(index.expected("t", "y" * BLOCK)) == MAX_REPLICAS


def test_a_new_launch_has_nothing_cached() -> None:
    index, text = PrefixIndex(), "x" * BLOCK
    index.note("a", "t", text)
    index.note("b", "t", text)
    index.prune({"a": 1, "b": 1})
    assert set(index.expected("t", text)) == {"a", "b"}
    index.prune({"a": 2})
    assert index.expected("t", text) == {}
    index.note("a", "t", text)
    index.prune({"a": 2})
    assert index.expected("t", text) == {"a": BLOCK}
