"""The decoder against Hugging Face transformers, on the bundled model in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.blocks import BlockPool
from engine.grammar import NO_MASKS
from engine.model.attention import KVCache
from engine.model.decoder import Decoder
from engine.model.loader import LoadedModel, load_model
from engine.runner import TorchRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer
from engine.types import SamplingParams

CPU = torch.device("cpu")
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 5, 8, 13,",
    "Die Würde des Menschen ist unantastbar. 人生は短い。",
    "Once upon a time, in a village by the sea, there lived a lighthouse keeper who " * 6,
]


class RecordingSampler(Sampler):
    """Keeps the logits of each row it sees, by (sequence id, position)."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def sample(self, logits, sequences, masks=NO_MASKS):  # type: ignore[no-untyped-def]
        for row, sequence in enumerate(sequences):
            self.logits[sequence.id, sequence.num_tokens] = logits[row].clone()
        return super().sample(logits, sequences, masks)


class Bench:
    """A scheduler and a real runner, stepped by hand."""

    def __init__(self, model: LoadedModel, *, batched: int = 512, cache: bool = False) -> None:
        config = model.config
        dtype = model.weights.embedding.dtype
        kv = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, 256, 16, dtype, CPU)
        self.sampler = RecordingSampler()
        self.runner = TorchRunner(Decoder(config, model.weights, 1024), kv, self.sampler)
        limits = SchedulerLimits(max_num_batched_tokens=batched, prefix_cache=cache)
        self.scheduler = Scheduler(BlockPool(256, 16), limits)

    def run(self, *prompts: list[int], max_tokens: int = 1, first_id: int = 0) -> list[Sequence]:
        params = SamplingParams(max_tokens, temperature=0.0)
        sequences = [Sequence(first_id + at, ids, params) for at, ids in enumerate(prompts)]
        for sequence in sequences:
            self.scheduler.add(sequence)
        while self.scheduler.has_work:
            step = self.scheduler.schedule()
            self.scheduler.complete(step, self.runner.sample(step, self.runner.forward(step)))
        return sequences

    def logits(self, id: int, position: int) -> torch.Tensor:
        return self.sampler.logits[id, position]


@pytest.fixture(scope="module")
def reference(bundled_model: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        bundled_model.parent, gguf_file=bundled_model.name, dtype=torch.float32
    )
    return model.eval()


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@torch.inference_mode()
def test_logits_match_transformers_on_every_prompt(
    loaded: LoadedModel, tokenizer: Tokenizer, reference: PreTrainedModel
) -> None:
    """One mixed batch of all prompts: top-1 agrees and the relative error is float32 noise."""
    bench = Bench(loaded)
    ids = [tokenizer.encode(text) for text in PROMPTS]
    for sequence, prompt in zip(bench.run(*ids), ids, strict=True):
        theirs = reference(torch.tensor([prompt])).logits[0, -1]
        ours = bench.logits(sequence.id, len(prompt))
        assert error(ours, theirs) < 1e-4
        assert int(ours.argmax()) == int(theirs.argmax())


@torch.inference_mode()
def test_decoding_matches_transformers_token_by_token(
    loaded: LoadedModel, tokenizer: Tokenizer, reference: PreTrainedModel
) -> None:
    """Greedy continuations in one batch: every step's logits equal a full forward pass."""
    bench = Bench(loaded)
    ids = [tokenizer.encode(text) for text in PROMPTS]
    for sequence in bench.run(*ids, max_tokens=16):
        theirs = reference(torch.tensor([sequence.tokens])).logits[0]
        for position in range(sequence.num_prompt, sequence.num_tokens):
            ours = bench.logits(sequence.id, position)
            assert error(ours, theirs[position - 1]) < 1e-4
            assert int(theirs[position - 1].argmax()) == sequence.tokens[position]


def test_chunked_prefill_equals_whole_prefill(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPTS[4])
    whole, chunked = Bench(loaded), Bench(loaded, batched=7)
    chunked.scheduler.limits = SchedulerLimits(max_num_seqs=7, max_num_batched_tokens=7)
    whole.run(prompt)
    chunked.run(prompt)
    assert error(chunked.logits(0, len(prompt)), whole.logits(0, len(prompt))) < 1e-4


def test_a_cached_prefix_equals_a_computed_one(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPTS[4])
    bench = Bench(loaded, cache=True)
    first, second = bench.run(prompt)[0], bench.run(prompt, first_id=1)[0]
    assert first.num_cached == 0
    assert second.num_cached == (len(prompt) - 1) // 16 * 16 > 0
    assert error(bench.logits(1, len(prompt)), bench.logits(0, len(prompt))) < 1e-4


def test_batch_mates_do_not_change_a_row(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """Lengths from 5 to 100 in one decode batch: padding leaks into nobody."""
    ids = [tokenizer.encode(text) for text in PROMPTS]
    together = Bench(loaded)
    for sequence in together.run(*ids, max_tokens=6):
        alone = Bench(loaded)
        mate = alone.run(ids[sequence.id], max_tokens=6)[0]
        assert mate.tokens == sequence.tokens
        at = sequence.num_tokens - 1
        assert error(together.logits(sequence.id, at), alone.logits(0, at)) < 1e-4


@torch.inference_mode()
def test_bf16_stays_close_to_float32(bundled_model: Path, tokenizer: Tokenizer, reference: PreTrainedModel) -> None:
    """The served type: a few percent of logit error, and top-1 almost always the same."""
    model = load_model(bundled_model, torch.bfloat16, CPU)
    bench = Bench(model)
    same = total = 0
    for sequence in bench.run(*[tokenizer.encode(text) for text in PROMPTS], max_tokens=16):
        theirs = reference(torch.tensor([sequence.tokens])).logits[0]
        for position in range(sequence.num_prompt, sequence.num_tokens):
            assert error(bench.logits(sequence.id, position), theirs[position - 1]) < 0.08
            same += int(theirs[position - 1].argmax()) == sequence.tokens[position]
            total += 1
    assert same / total > 0.9
