"""Budget: chunks shrink with the context, and never to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import MIN_CHUNK, UNCUT, UNIT, Budget


@pytest.mark.parametrize("start", [0, 512, 1024, UNCUT])
def test_a_full_chunk_is_uncut_up_to_two_thousand_tokens(start: int) -> None:
    assert Budget(512).fitting(start, 10_000) == 512


def test_chunks_shrink_further_on_so_that_their_work_stays_the_same() -> None:
    sizes = [Budget(512).fitting(start, 10_000) for start in (2_000, 4_000, 8_000, 32_000)]
    assert sizes == [444, 279, 158, 43]
    for size, start in zip(sizes, (2_000, 4_000, 8_000, 32_000), strict=True):
        assert size * (1 + (start + size / 2) / UNIT) == pytest.approx(1408, rel=0.03)


def test_a_short_rest_is_taken_whole() -> None:
    assert Budget(512).fitting(8_000, 20) == 20


def test_decodes_far_into_their_context_leave_less_for_prompts_but_never_nothing() -> None:
    budget = Budget(512)
    for _ in range(64):
        budget.spend(100_000, 1)
    assert budget.fitting(100_000, 512) == MIN_CHUNK
    budget.tokens = 3
    assert budget.fitting(100_000, 512) == 3


@given(st.integers(1, 4096), st.integers(0, 200_000), st.integers(1, 20_000))
def test_a_chunk_fits_the_tokens_and_a_prompt_always_ends(tokens: int, start: int, rest: int) -> None:
    budget = Budget(tokens)
    count = budget.fitting(start, rest)
    assert min(rest, tokens, MIN_CHUNK) <= count <= min(rest, tokens)
    budget.spend(start, count)
    assert budget.tokens == tokens - count
