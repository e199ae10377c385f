"""Draws under a mask in the library against the sampler, which does the same in torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.fused_runner import _draw
from engine.model.fused import RUN, FusedModel
from engine.native.build import NativeUnavailable, find_library
from engine.native.library import DRAW, open_library
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.types import SamplingParams


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        return open_library(find_library().path)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def mask_of(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.5},
]


@pytest.mark.parametrize("vocab", [97, 512, 49_152])
@pytest.mark.parametrize("share", [0.5, 0.001])
def test_the_library_picks_what_the_sampler_picks(library: ctypes.CDLL, vocab: int, share: float) -> None:
    generator = np.random.default_rng(vocab)
    stub: Any = SimpleNamespace(_library=library, config=SimpleNamespace(vocab_size=vocab))
    differing = 0
    for seed in range(40):
        sequences = [
            Sequence(at, [1], SamplingParams(max_tokens=9, seed=seed, **parameters))
            for at, parameters in enumerate(PARAMETERS)
        ]
        allowed = generator.random((len(sequences), vocab)) < share
        allowed[:, seed % vocab] = True
        logits = torch.from_numpy(generator.normal(size=(len(sequences), vocab)).astype(np.float32) * 4)
        masks = [mask_of(row) for row in allowed]
        rows = torch.empty(len(sequences), -(-vocab // RUN) * RUN)
        rows[:, :vocab] = logits
        picked = FusedModel.pick(stub, rows, masks, np.array([_draw(s) for s in sequences], DRAW))
        assert all(allowed[at, token] for at, token in enumerate(picked))
        expected = Sampler().sample(logits, sequences, dict(enumerate(masks)))
        differing += sum(token != other.token_id for token, other in zip(picked, expected, strict=True))
    assert differing <= 2, "only draws at a border of two tokens may round to the other side"


def test_a_mask_that_allows_nothing_still_gives_a_token(library: ctypes.CDLL) -> None:
    """It never happens, and must not reach outside the vocabulary if it does."""
    stub: Any = SimpleNamespace(_library=library, config=SimpleNamespace(vocab_size=100))
    sequences = [
        Sequence(0, [1], SamplingParams(max_tokens=9, temperature=t, top_p=p)) for t, p in ((0, 1), (1, 1), (1, 0.5))
    ]
    draws = np.array([_draw(s) for s in sequences], DRAW)
    picked = FusedModel.pick(stub, torch.zeros(3, RUN), [np.zeros(4, np.int32)] * 3, draws)
    assert all(0 <= token < 100 for token in picked)
