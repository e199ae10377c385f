"""The estimate of memory over random sizes: what must hold for any model."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.footprint import (
    Footprint,
    Shape,
    advice,
    buys,
    estimate,
    held_weights,
    kept_bytes,
    kv_bytes,
    kv_pool,
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """A dense decoder, stored in 16 bits."""
    kv_heads = draw(st.integers(1, 16))
    heads = kv_heads * draw(st.integers(1, 8))
    head_dim = draw(st.sampled_from([32, 64, 128]))
    hidden = 64 * draw(st.integers(1, 128))
    intermediate, vocab = 64 * draw(st.integers(1, 400)), draw(st.integers(16, 200_000))
    layers, tied = draw(st.integers(1, 100)), draw(st.booleans())
    bare = Shape(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, 0, 0, 4096)
    parameters = bare.linear_elements + (1 if tied else 2) * vocab * hidden + hidden * (2 * layers + 1)
    return replace(bare, parameters=parameters, weights_bytes=2 * parameters)


@given(shape=shapes())
def test_tied_heads_are_told_by_the_number_of_parameters(shape: Shape) -> None:
    tables = shape.parameters - shape.linear_elements - shape.hidden * (2 * shape.layers + 1)
    norms = shape.hidden * (2 * shape.layers + 1)
    if norms < shape.vocab * shape.hidden / 2:  # else the norms outweigh the vocabulary, as in no real model
        assert shape.tied == (tables == shape.vocab * shape.hidden)


@given(shape=shapes(), kind=st.sampled_from(["cpu", "gpu"]))
def test_fewer_bits_never_take_more_bytes(shape: Shape, kind: str) -> None:
    held = [held_weights(shape, engine="vllm", quantisation=q) for q in ("", "fp8", "awq")]
    assert held[0] >= held[1] >= held[2] >= kept_bytes(shape)
    wide, narrow = (held_weights(shape, engine="embedded", quantisation=q, kind=kind) for q in ("fp32", "bf16"))
    assert wide > narrow


@given(
    shape=shapes(), concurrency=st.integers(1, 512), tokens=st.integers(1, 100_000),
    block=st.sampled_from([8, 16, 32, 128]),
)  # fmt: skip
def test_a_pool_of_what_was_estimated_buys_what_was_asked_for(
    shape: Shape, concurrency: int, tokens: int, block: int
) -> None:
    pool = kv_bytes(shape, concurrency, tokens, block)
    assert buys(pool, shape, tokens, block) == concurrency
    assert buys(pool - 1, shape, tokens, block) == concurrency - 1
    assert kv_bytes(shape, concurrency, tokens + block, block) > pool


@given(shape=shapes(), parallel=st.sampled_from([1, 2, 4, 8]), concurrency=st.integers(1, 64))
def test_more_cards_never_make_a_part_larger(shape: Shape, parallel: int, concurrency: int) -> None:
    def parts(cards: int) -> Footprint:
        return estimate(
            shape, engine="vllm", concurrency=concurrency, tokens=1024, max_num_batched_tokens=2048,
            tensor_parallel=cards,
        )  # fmt: skip

    one, many = parts(1), parts(parallel)
    assert many.weights <= one.weights and many.kv <= one.kv and many.activations <= one.activations
    assert many.overhead == one.overhead


@given(total=st.integers(1, 1 << 40), utilisation=st.floats(0, 1), parts=st.tuples(*[st.integers(0, 1 << 38)] * 4))
def test_a_pool_is_never_negative_and_never_more_than_the_card(
    total: int, utilisation: float, parts: tuple[int, int, int, int]
) -> None:
    pool = kv_pool(total, utilisation, Footprint(*parts))
    assert 0 <= pool <= total


@given(shape=shapes())
def test_advice_saves_at_most_what_four_bits_can(shape: Shape) -> None:
    for row in advice(shape.parameters, shape.weights_bytes, kept_bytes(shape)):
        assert 0 <= row.saved <= 0.75 and row.bytes <= shape.weights_bytes
