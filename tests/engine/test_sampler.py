"""Sampling: each row under its own parameters, independent of its batch mates."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler as module
from engine.sampler import Sampler, draw, draw_one, invert, uniform
from engine.sequence import Sequence
from engine.types import SamplingParams

VOCAB = 200


def sequence(output: list[int] | None = None, id: int = 0, **params: Any) -> Sequence:
    made = Sequence(id, [1, 2, 3], SamplingParams(**{"max_tokens": 99, **params}))
    made.tokens += output or []
    return made


def logits(seed: int = 0, rows: int = 1, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def pick(values: torch.Tensor, **params: Any) -> int:
    return Sampler().sample(values.clone(), [sequence(**params)])[0].token_id


def reachable(values: torch.Tensor, count: int = 400, **params: Any) -> Counter[int]:
    """Tokens drawn over many seeds."""
    rows = values.expand(count, -1).clone()
    sequences = [sequence(seed=seed, **params) for seed in range(count)]
    return Counter(draw(rows, sequences).tolist())


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert pick(logits(), temperature=0.0, seed=5) == int(logits().argmax())


def test_frequencies_follow_the_distribution() -> None:
    values = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    drawn = reachable(values, 4000)
    for token, share in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert abs(drawn[token] / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)


def test_top_k_reaches_the_k_best_only() -> None:
    best = set(logits()[0].topk(3).indices.tolist())
    assert set(reachable(logits(scale=0.1), top_k=3)) <= set(logits(scale=0.1)[0].topk(3).indices.tolist())
    assert set(reachable(logits(), top_k=3)) <= best


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    top_p=st.floats(0.05, 1.0),
    top_k=st.sampled_from([0, 1, 5, 50]),
    min_p=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_draws_stay_in_the_set_a_plain_implementation_allows(
    seed: int, top_p: float, top_k: int, min_p: float, scale: float
) -> None:
    """Staged candidates (here 4, then 16, then all) must not change the allowed set."""
    values = logits(seed, scale=scale)
    probs = values[0].double().softmax(-1)
    probs[probs < probs.max() * min_p - 1e-9] = 0
    order = probs.argsort(descending=True, stable=True)
    if top_k:
        probs[order[top_k:]] = 0
    before = probs[order].cumsum(0) - probs[order]
    allowed = {
        int(id) for id, mass in zip(order, before, strict=True) if mass < top_p * probs.sum() + 1e-6 and probs[id] > 0
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CANDIDATES", (4, 16))
        drawn = reachable(values, 100, top_p=top_p, top_k=top_k, min_p=min_p)
    assert set(drawn) <= allowed


def test_a_seeded_row_does_not_depend_on_its_mates() -> None:
    """The same row alone, and among rows of every other kind, in any place."""
    mine = sequence(seed=42, temperature=0.9, top_p=0.9)
    mates = [
        sequence(temperature=0.0),
        sequence(seed=1, top_k=5),
        sequence(seed=2, output=[5, 5, 9], presence_penalty=1.0, frequency_penalty=0.5),
        sequence(seed=3, min_p=0.2, logit_bias=((7, 5.0),)),
    ]
    alone = Sampler().sample(logits(7), [mine])[0]
    for place in range(5):
        batch = [*mates[:place], mine, *mates[place:]]
        rows = logits(9, 5)
        rows[place] = logits(7)[0]
        assert Sampler().sample(rows, batch)[place] == alone


def test_the_draw_moves_with_the_position_and_repeats_with_the_seed() -> None:
    draws = [uniform(7, at) for at in range(1000)]
    assert draws == [uniform(7, at) for at in range(1000)]
    assert len(set(draws)) == 1000
    assert abs(sum(draws) / 1000 - 0.5) < 0.05
    assert all(0 <= value < 1 for value in draws)
    assert uniform(-1, 0) != uniform(1, 0)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=9), st.floats(0, 1))
def test_a_token_without_weight_is_never_drawn(weights: list[float], at: float) -> None:
    if sum(weights) == 0:
        return
    probs = torch.tensor([weights])
    assert weights[int(invert(probs, torch.tensor([at], dtype=torch.float64)))] > 0


def test_logit_bias_can_force_and_ban() -> None:
    assert pick(logits(), temperature=0.0, logit_bias=((11, 100.0),)) == 11
    best = int(logits().argmax())
    assert pick(logits(), temperature=0.0, logit_bias=((best, -100.0),)) != best


def test_penalties_count_what_was_generated() -> None:
    values = torch.zeros(1, VOCAB)
    values[0, 5], values[0, 6] = 2.0, 1.0
    once = [5]
    assert pick(values, temperature=0.0, output=once) == 5
    assert pick(values, temperature=0.0, output=once, presence_penalty=1.5) == 6
    assert pick(values, temperature=0.0, output=once, frequency_penalty=0.6) == 5
    assert pick(values, temperature=0.0, output=[5, 5], frequency_penalty=0.6) == 6
    assert pick(values, temperature=0.0, output=once, repetition_penalty=3.0) == 6


def test_repetition_penalty_covers_the_prompt_and_negative_logits() -> None:
    values = torch.full((1, VOCAB), -5.0)
    values[0, 2], values[0, 9] = -1.0, -1.5
    assert pick(values, temperature=0.0) == 2
    assert pick(values, temperature=0.0, repetition_penalty=2.0) == 9


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    values = torch.zeros(1, VOCAB)
    values[0, 8], values[0, 9] = 5.0, 1.0
    stop = {"temperature": 0.0, "stop_token_ids": frozenset([8]), "min_tokens": 2}
    assert pick(values, **stop) == 9
    assert pick(values, output=[1, 1], **stop) == 8


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    expected = logits().log_softmax(-1)[0]
    sampled = Sampler().sample(logits(), [sequence(temperature=0.0, top_logprobs=2, logit_bias=((11, 100.0),))])[0]
    assert sampled.token_id == 11
    assert sampled.logprob == pytest.approx(float(expected[11]))
    assert [id for id, _ in sampled.top] == expected.topk(2).indices.tolist()


EXTREMES: list[dict[str, Any]] = [
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e-40, "top_p": 0.5},
    {"top_p": 5e-324},
    {"top_p": 5e-324, "top_k": 1, "temperature": 1e-300},
    {"min_p": 1.0, "temperature": 1e-300},
    {"min_tokens": 9, "stop_token_ids": frozenset(range(VOCAB))},
    {"logit_bias": tuple((id, -100.0) for id in range(VOCAB)), "repetition_penalty": 5e-324},
]


@pytest.mark.parametrize("params", EXTREMES, ids=lambda params: "-".join(params))
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e3])
def test_no_parameters_in_range_lead_out_of_the_vocabulary(params: dict[str, Any], scale: float) -> None:
    """Seen: a tiny repetition penalty made a row NaN, its draw one past the end, and the next step ended the engine."""
    values = logits(scale=scale)
    for seed in range(20):
        for temperature in (params.get("temperature", 1.0), 0.0):
            assert 0 <= pick(values, seed=seed, **params | {"temperature": temperature}) < VOCAB


def test_a_tiny_repetition_penalty_still_draws_a_seen_token() -> None:
    values = torch.ones(1, VOCAB)
    assert {pick(values, seed=seed, repetition_penalty=1e-300) for seed in range(20)} <= {1, 2, 3}


def test_a_model_that_answers_nan_gives_some_token() -> None:
    assert 0 <= pick(torch.full((1, VOCAB), torch.nan), seed=1, top_p=0.5) < VOCAB


@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("vocab", [97, 256, 1000, 49_152])
def test_one_thread_draws_what_torch_draws(vocab: int, min_p: float) -> None:
    """Both invert the same distribution, with some tokens forbidden."""
    generator = torch.Generator().manual_seed(vocab)
    for seed in range(40):
        row = torch.randn(vocab, generator=generator) * 4
        row[torch.rand(vocab, generator=generator) < 0.5] = -torch.inf
        sequence = Sequence(0, [1], SamplingParams(max_tokens=9, temperature=0.7, min_p=min_p, seed=seed))
        drawn = draw_one(row.clone().numpy(), sequence.params, uniform(seed, sequence.num_tokens))
        assert torch.isfinite(row[drawn])
        assert drawn == int(draw(row[None], [sequence])[0])


def test_one_thread_stays_in_range_at_the_edges() -> None:
    params = SamplingParams(max_tokens=9)
    row = np.full(1000, -np.inf, np.float32)
    row[7] = row[999] = 1.0
    assert draw_one(row.copy(), params, 0.0) == 7
    assert draw_one(row.copy(), params, 1 - 2**-53) == 999
    assert draw_one(np.full(10, np.nan, np.float32), params, 0.5) == 0
