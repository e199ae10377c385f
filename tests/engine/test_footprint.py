"""The estimate of memory against what the real engine holds, and against hand-made figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.footprint import (
    GIB,
    Footprint,
    Shape,
    activation_bytes,
    advice,
    buys,
    default_overhead,
    estimate,
    held_weights,
    kept_bytes,
    kv_bytes,
    kv_bytes_per_token,
    kv_pool,
    utilisation_warning,
)
from engine.model.config import ModelConfig
from engine.model.loader import open_source
from engine.paths import choose_path
from engine.tokenizer import Tokenizer
from tests.engine.served import Served

LLAMA_7B = Shape(32, 4096, 32, 32, 128, 11008, 32000, 6_738_415_616, 13_476_831_232, 4096)


def shape_of(config: ModelConfig, parameters: int, by_type: dict[str, int]) -> Shape:
    return Shape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        parameters=parameters,
        weights_bytes=sum(by_type.values()),
        context=config.max_position,
        by_type=by_type,
    )


def gguf_shape(path: Path) -> Shape:
    by_type: dict[str, int] = {}
    tensors = GGUFReader(path).tensors
    for tensor in tensors:
        by_type[tensor.tensor_type.name] = by_type.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    return shape_of(open_source(path).config, sum(int(tensor.n_elements) for tensor in tensors), by_type)


def within(estimated: float, real: float, share: float = 0.02) -> bool:
    return abs(estimated - real) <= share * real


@pytest.fixture(scope="module", params=[64, 32], ids=["30 M, fused", "heads of 32, plain"])
def random_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shape]:
    """A model of 30 million random weights, with the bundled model's vocabulary, as safetensors in 16 bits."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=256, intermediate_size=1024, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=2, head_dim=request.param, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("random")
    model.save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    assert 25_000_000 < parameters < 35_000_000
    return folder, shape_of(open_source(folder).config, parameters, {"BF16": 2 * parameters})


def test_the_served_bundled_model_holds_what_was_estimated(served: Served, bundled_model: Path) -> None:
    shape, facts = gguf_shape(bundled_model), served.facts
    assert facts["dtype"] in ("q4", "bf16")  # as it is without a compiler
    dtype = "" if facts["dtype"] == "q4" else facts["dtype"]
    estimated = estimate(
        shape, engine="embedded", quantisation=dtype, kind="cpu", concurrency=1, block_size=facts["block_size"],
        tokens=facts["num_blocks"] * facts["block_size"], max_num_batched_tokens=512,
    )  # fmt: skip
    assert within(estimated.weights, facts["weights_bytes"]), (estimated.weights, facts["weights_bytes"])
    assert within(estimated.kv, facts["kv_bytes"]), (estimated.kv, facts["kv_bytes"])


@pytest.mark.parametrize("dtype", ["auto", "int8", "bf16", "fp32"])
def test_a_second_size_holds_what_was_estimated(
    random_model: tuple[Path, Shape], tokenizer: Tokenizer, dtype: str
) -> None:
    folder, shape = random_model
    config = EngineConfig(model=folder, dtype=dtype, num_blocks=130, device="cpu", threads=1)
    path = choose_path(config, open_source(folder), tokenizer, lambda done: None)
    assert path.passed_over is None or "head_dim is 32" in path.passed_over, path.passed_over
    size = 4 if dtype == "fp32" else 2
    estimated = estimate(
        shape, engine="embedded", quantisation=dtype, kind="cpu", kv_dtype_bytes=size, concurrency=10, tokens=200,
        max_num_batched_tokens=512,
    )  # fmt: skip
    assert within(estimated.weights, path.weights_bytes), (estimated.weights, path.weights_bytes)
    assert within(estimated.kv, path.runner.cache.num_bytes), (estimated.kv, path.runner.cache.num_bytes)


def test_kv_is_counted_in_whole_blocks() -> None:
    assert kv_bytes_per_token(LLAMA_7B) == 32 * 2 * 32 * 128 * 2
    assert kv_bytes(LLAMA_7B, 3, 17, 16) == 3 * 32 * kv_bytes_per_token(LLAMA_7B)
    assert kv_bytes(LLAMA_7B, 3, 17, 16, kv_dtype_bytes=1) * 2 == kv_bytes(LLAMA_7B, 3, 17, 16)


def test_a_kv_head_is_never_cut_over_cards() -> None:
    grouped = Shape(2, 512, 8, 2, 64, 1024, 1000, 1, 2, 2048)
    assert kv_bytes_per_token(grouped, tensor_parallel=2) * 2 == kv_bytes_per_token(grouped)
    assert kv_bytes_per_token(grouped, tensor_parallel=4) == kv_bytes_per_token(grouped, tensor_parallel=2)


def test_two_cards_share_weights_and_not_the_overhead() -> None:
    known: dict[str, Any] = {"engine": "vllm", "concurrency": 16, "tokens": 2048, "max_num_batched_tokens": 8192}
    one, two = estimate(LLAMA_7B, **known), estimate(LLAMA_7B, **known, tensor_parallel=2)
    assert (two.weights, two.kv) == (one.weights // 2, one.kv // 2)
    assert two.overhead == one.overhead == default_overhead("vllm", "gpu").bytes
    assert one.total == sum(one.parts().values())
    assert estimate(LLAMA_7B, **known, overhead=5).overhead == 5


def test_activations_of_a_7b_are_what_the_rule_of_thumb_says() -> None:
    assert 0.5 * GIB < activation_bytes(LLAMA_7B, "vllm", 8192, 256) < 2 * GIB


def test_vllm_holds_the_files_bytes_and_32_bits_in_16() -> None:
    assert held_weights(LLAMA_7B, engine="vllm") == LLAMA_7B.weights_bytes
    stored_wide = Shape(2, 512, 8, 2, 64, 1024, 1000, 100, 400, 2048, {"F32": 400})
    assert held_weights(stored_wide, engine="vllm") == 200
    kept = kept_bytes(LLAMA_7B)
    assert kept == 2 * (LLAMA_7B.parameters - LLAMA_7B.linear_elements) > 2 * 2 * 32000 * 4096
    assert held_weights(LLAMA_7B, engine="vllm", quantisation="fp8") == kept + LLAMA_7B.linear_elements


def test_a_quantised_file_is_not_made_smaller_a_second_time() -> None:
    stored = Shape(32, 4096, 32, 32, 128, 11008, 32000, 6_738_415_616, 3_890_000_000, 4096)
    assert held_weights(stored, engine="vllm", quantisation="awq") == stored.weights_bytes
    assert held_weights(stored, engine="vllm") == stored.weights_bytes


def test_the_pool_is_what_is_left_and_buys_whole_requests() -> None:
    part = Footprint(weights=14 * GIB, kv=4 * GIB, activations=GIB, overhead=GIB)
    pool = kv_pool(80 * GIB, 0.9, part)
    assert pool == 80 * GIB - 14 * GIB - GIB - (int(80 * GIB * (1 - 0.9)) + GIB)
    each = kv_bytes(LLAMA_7B, 1, 2048, 16)
    assert buys(pool, LLAMA_7B, 2048, 16) == pool // each == 56
    assert kv_pool(10 * GIB, 0.9, part) == 0
    assert buys(0, LLAMA_7B, 2048, 16) == 0


@pytest.mark.parametrize(("value", "sound"), [(0.84, False), (0.85, True), (0.92, True), (0.93, False)])
def test_a_share_of_the_card_outside_of_the_sound_band_is_warned_of(value: float, sound: bool) -> None:
    assert (utilisation_warning(value) is None) is sound


@pytest.mark.parametrize(
    ("billions", "advised"), [(0.135, {"", "int8"}), (13, {"", "int8"}), (32, {"int8", "awq"}), (72, {"awq", "gptq"})]
)
def test_advice_goes_by_size(billions: float, advised: set[str]) -> None:
    parameters = int(billions * 1e9)
    assert {row.quantisation for row in advice(parameters, 2 * parameters) if row.advised} == advised


def test_four_bits_save_at_most_three_quarters_of_the_real_bytes() -> None:
    for kept in (0, kept_bytes(LLAMA_7B)):
        rows = {row.quantisation: row for row in advice(LLAMA_7B.parameters, LLAMA_7B.weights_bytes, kept)}
        assert rows[""].bytes == LLAMA_7B.weights_bytes and rows[""].saved == 0
        assert 0.65 < rows["awq"].saved < 0.75
        assert 0.45 < rows["int8"].saved <= 0.5
    stored_in_4_bits = advice(LLAMA_7B.parameters, 3_890_000_000)
    assert stored_in_4_bits[0].bytes == 2 * LLAMA_7B.parameters
