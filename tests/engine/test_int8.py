"""Int8 on the plain path: what rounding costs, and that both ways to multiply say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.boot import build
from engine.config import EngineConfig
from engine.model import int8
from engine.model.int8 import quantise
from engine.model.layers import embed, linear
from engine.model.loader import load_int8, load_weights, open_source
from engine.model.reference import Reference, divergence
from engine.runner import TorchRunner
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer
from engine.types import SamplingParams
from tests.engine.test_embeddings import play
from tests.engine.test_numerics import PROMPTS

CPU = torch.device("cpu")


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_each_row_is_rounded_to_half_a_127th_of_its_largest_value() -> None:
    weights = matrix(48, 64) * torch.logspace(-3, 3, 48)[:, None]
    kept = quantise(weights, torch.bfloat16)
    assert ((kept.lookup(torch.arange(48)) - weights).abs() <= kept.scale.float()[:, None] * 0.502).all()
    assert kept.data.abs().amax(1).min() >= 126, "the range is used"
    assert (kept.num_bytes, kept.dtype, kept.device) == (48 * 64 + 48 * 2, torch.bfloat16, CPU)


def test_a_row_of_zeros_stays_one() -> None:
    assert quantise(torch.zeros(2, 8), torch.bfloat16).lookup(torch.tensor([1])).tolist() == [[0.0] * 8]


@pytest.mark.parametrize("rows", [0, 1, int8.PACKED_ROWS, int8.PACKED_ROWS + 1, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_rounded_weights(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows go to torch's own 8-bit product, more through widened weights, here in several tiles."""
    monkeypatch.setattr(int8, "WIDENED", 64 * 20)
    kept = quantise(matrix(48, 64), dtype)
    x, bias = matrix(rows, 64, 1)[:, :, 0].to(dtype), matrix(48).to(dtype)
    exact = x.double() @ kept.lookup(torch.arange(48)).double().T
    for given in (None, bias):
        wanted = exact if given is None else exact + given.double()
        error = (linear(x, kept, given).double() - wanted).norm() / wanted.norm().clamp(min=1e-9)
        assert error < (0.005 if dtype == torch.bfloat16 else 1e-6)


def test_the_model_says_almost_the_same_in_half_the_memory(bundled_model: Path, tokenizer: Tokenizer) -> None:
    """Against the same model in float32, in nats; bench/engine_quality.py measures it on more text."""
    source = open_source(bundled_model)
    exact = load_weights(source, torch.float32, CPU, lambda done: None)
    kept = load_int8(source, torch.bfloat16, CPU, lambda done: None)
    assert kept.head is kept.embedding
    assert kept.num_bytes < 0.51 * exact.num_bytes / 2
    tokens = tokenizer.encode(" ".join(PROMPTS))
    logits = []
    for weights in (exact, kept):
        reference = Reference(source.config, tokens, weights.embedding, weights.norm)
        for layer in weights.layers:
            reference.advance(layer)
        logits.append(reference.logits(weights.head))
    assert divergence(*logits) < 0.015
    assert embed(torch.tensor([3]), kept.embedding).dtype == torch.float32


def test_int8_is_served_without_a_compiler(
    bundled_model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FANLIGHT_NATIVE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = build(EngineConfig(bundled_model, dtype="int8", num_blocks=64, max_model_len=512))
    facts = engine.facts()
    assert (facts["dtype"], facts["path"]) == ("int8", "plain")
    assert "no-such-compiler" in facts["passed_over"]
    assert isinstance(engine.runner, TorchRunner)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    sequence = Sequence(1, prompt, SamplingParams(12, temperature=0.0))
    engine.scheduler.add(sequence)
    play(engine.scheduler, engine.runner)
    assert "Paris" in tokenizer.decode(sequence.tokens[sequence.num_prompt :])
