"""Every family and every rope scaling against Hugging Face transformers, on both paths; weights are random."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import UnsupportedModel
from engine.model.config import config_from_gguf, config_from_hf
from engine.model.fused import FusedCache, FusedModel
from engine.model.fused_loader import load_fused, logits_of, verify
from engine.model.loader import load_model, open_source
from engine.model.reference import divergence
from engine.model.rope import rotary
from engine.native.build import NativeUnavailable, find_library
from engine.native.library import open_library
from tests.engine.test_loader import HF
from tests.engine.test_numerics import Bench, error

CPU = torch.device("cpu")
VOCAB = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn-told": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.9,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
}


def llama(scaling: str) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=_parameters(scaling)))


def mistral(scaling: str = "default") -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None, rope_parameters=_parameters(scaling)))


def qwen2(scaling: str = "default") -> PreTrainedModel:
    """With biases, and a head tied to the embedding."""
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"hidden_size": 256}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True, rope_parameters=_parameters(scaling)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def qwen3(scaling: str = "default") -> PreTrainedModel:
    """With norms of queries and keys."""
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=_parameters(scaling)))
    for name, parameter in model.named_parameters():
        if "_norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


CASES = [
    *(pytest.param(llama, scaling, id=f"llama-{scaling}") for scaling in SCALINGS),
    *(pytest.param(make, "default", id=make.__name__) for make in (mistral, qwen2, qwen3)),
    pytest.param(qwen2, "yarn", id="qwen2-yarn"),
    pytest.param(qwen3, "yarn", id="qwen3-yarn"),
    pytest.param(mistral, "yarn", id="mistral-yarn"),
]
Make = Callable[[str], PreTrainedModel]


@pytest.mark.parametrize(("make", "scaling"), CASES)
@torch.inference_mode()
def test_the_plain_path_computes_what_transformers_computes(make: Make, scaling: str, tmp_path: Path) -> None:
    """Prompts of three lengths and four tokens each, in one batch, chunked."""
    model = saved(make, scaling, tmp_path)
    bench = Bench(load_model(tmp_path, torch.float32, CPU), batched=64)
    prompts = [torch.randint(0, VOCAB, (n,)).tolist() for n in (3, 40, 300)]
    for sequence in bench.run(*prompts, max_tokens=4):
        theirs = model(torch.tensor([sequence.tokens])).logits[0]
        for position in range(sequence.num_prompt, sequence.num_tokens):
            assert error(bench.logits(sequence.id, position), theirs[position - 1]) < 1e-4
    gc.collect()


@pytest.mark.parametrize(("make", "scaling"), CASES)
@torch.inference_mode()
def test_the_fused_path_says_the_same_but_for_rounding(make: Make, scaling: str, tmp_path: Path) -> None:
    """In nats from transformers: 8-bit rounding costs a hundredth; the wrong rope would cost a tenth or more."""
    model = saved(make, scaling, tmp_path)
    prompt = torch.randint(0, VOCAB, (300,)).tolist()
    truth = model(torch.tensor([prompt])).logits[0]
    with fused(tmp_path, prompt[:60]) as engine:
        assert divergence(truth, logits_of(engine, prompt, 0)) < 0.03
    gc.collect()


@torch.inference_mode()
def test_these_models_tell_one_rope_from_another(tmp_path: Path) -> None:
    """What the bound of the test above is worth: scaled and plain rope are far apart on the same weights."""
    prompt = torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(1))[None]
    torch.manual_seed(0)
    plain = llama("default").eval()
    for scaling in ("linear", "llama3", "yarn", "yarn-mscale"):
        torch.manual_seed(0)
        scaled = llama(scaling).eval()
        assert divergence(plain(prompt).logits[0], scaled(prompt).logits[0]) > 0.09, scaling


@pytest.mark.parametrize("scaling", [name for name in SCALINGS if name != "default"])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_frequencies_are_those_of_transformers(scaling: str, theta: float) -> None:
    """Also where the window of the training is a real one."""
    for original in (64, 4096, 32768):
        parameters = SCALINGS[scaling] | {"rope_theta": theta, "original_max_position_embeddings": original}
        config = LlamaConfig(head_dim=128, max_position_embeddings=2 * original, rope_parameters=parameters)
        theirs, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU)
        ours = rotary(theta, 128, parameters)
        torch.testing.assert_close(torch.tensor(ours.frequencies), theirs, rtol=2e-6, atol=0)
        assert ours.magnitude == pytest.approx(magnitude)


def test_yarn_reaches_past_the_window_of_the_config() -> None:
    """As Qwen2.5's cards tell people to write it: the config keeps the window of the training."""
    raw = HF | {"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    config = config_from_hf(raw)
    assert config.max_position == 131072
    assert config.rotary() == rotary(
        1e4, 16, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    )


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "longrope", "factor": 4.0}, "'longrope' is not supported: it turns keys otherwise"),
        ({"type": "su"}, "'su' is not supported"),
        ({"rope_type": "spiral", "factor": 4.0}, "'spiral' is not supported; linear, dynamic, yarn and llama3 are"),
        ({"rope_type": "linear"}, "'linear' lacks a value, or has a wrong one: 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' lacks a value, or has a wrong one: 'low_freq_factor'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "a part of each head"),
    ],
)
def test_rope_scaling_that_cannot_be_had_is_refused_when_the_config_is_read(
    scaling: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_from_hf(HF | {"rope_parameters": scaling})


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, 32),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, 32),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, None),
        ({"model_type": "qwen3", "sliding_window": 32}, None),
    ],
)
def test_a_sliding_window_is_served_as_far_as_it_makes_no_difference(change: dict[str, Any], window: int) -> None:
    config = config_from_hf(HF | change)
    assert config.sliding_window == window
    config.check_window(32)
    if window is not None:
        with pytest.raises(UnsupportedModel, match="set max_model_len to 32"):
            config.check_window(33)


def test_rope_scaling_of_a_gguf_file_means_what_it_means_in_a_config() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 8192}
    config = config_from_gguf(gguf_meta(yarn, context=8192), 10)
    told = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert config.rotary() == rotary(1e4, 64, told)
    assert config.max_position == 32768
    linear = config_from_gguf(gguf_meta({"type": "linear", "factor": 2.0}), 10)
    assert linear.rotary().frequencies == [f / 2 for f in rotary(1e4, 64, None).frequencies]
    sharper = config_from_gguf(gguf_meta(yarn | {"attn_factor": 0.5}), 10)
    assert sharper.rotary().magnitude == pytest.approx(config.rotary().magnitude / 2)
    listed = config_from_gguf(gguf_meta({}), 10, [4.0] * 32)
    assert listed.rotary().frequencies == [f / 4 for f in rotary(1e4, 64, None).frequencies]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 32}, "32 of 64 dimensions"),
        ({"llama.expert_count": 8}, "Mixtures of experts"),
        ({"llama.attention.value_length": 32}, "another size than keys"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads over 3 KV heads"),
    ],
)
def test_variants_in_a_gguf_header_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_from_gguf(gguf_meta({}) | more, 10)


def test_a_sliding_window_in_a_gguf_header_is_seen() -> None:
    assert config_from_gguf(gguf_meta({}) | {"llama.attention.sliding_window": 4096}, 10).sliding_window == 4096


@torch.inference_mode()
def test_a_mistral_written_as_gguf_is_the_same_model(tmp_path: Path) -> None:
    """llama.cpp calls it llama, and lays out its query and key rows in turns."""
    model = saved(mistral, "yarn", tmp_path)
    path = write_gguf(model, SCALINGS["yarn"], tmp_path / "m.gguf")
    bench = Bench(load_model(path, torch.float32, CPU))
    prompt = torch.randint(0, VOCAB, (200,)).tolist()
    bench.run(prompt)
    assert error(bench.logits(0, 200), model(torch.tensor([prompt])).logits[0, -1]) < 1e-4


def _parameters(scaling: str) -> dict[str, Any]:
    return {"rope_theta": 10_000.0, **SCALINGS[scaling]}


def saved(make: Make, scaling: str, folder: Path) -> PreTrainedModel:
    """A random model, saved as safetensors; its distribution is as sharp as a real one's."""
    torch.manual_seed(0)
    model = make(scaling).eval()
    head = model.get_output_embeddings().weight
    if head is not model.get_input_embeddings().weight:
        head.data.mul_(2)
    model.save_pretrained(folder)
    return model


@contextmanager
def fused(path: Path, probe: list[int]) -> Iterator[FusedModel]:
    """The model on the fused path, verified as at a start; skips where there is none."""
    try:
        library = open_library(find_library().path)
    except NativeUnavailable as why:
        pytest.skip(f"NOT RUN, the fused path: {why}")
    source = open_source(path)
    loaded = load_fused(source, probe, lambda done: None, four_bit=False)
    cache = FusedCache(source.config, 32, 16)
    model = FusedModel(library, source.config, loaded.weights, cache, max_len=512, max_tokens=512, threads=1)
    verify(model, loaded)
    yield model
    model.close()


def gguf_meta(scaling: dict[str, Any], context: int = 512) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 192,
        "llama.block_count": 3,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.context_length": context,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        **{f"llama.rope.scaling.{name}": value for name, value in scaling.items()},
    }


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: PreTrainedModel, scaling: dict[str, Any], path: Path) -> Path:
    """As llama.cpp's converter writes a Llama or a Mistral, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    for name, tensor in model.state_dict().items():
        writer.add_tensor(gguf_name(name), _interleaved(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    layer = ""
    if stem.startswith("model.layers."):
        _, _, index, stem = stem.split(".", 3)
        layer = f"blk.{index}."
    return f"{layer}{GGUF_NAMES[stem]}.{kind}"


def _interleaved(name: str, tensor: torch.Tensor, config: Any) -> np.ndarray[Any, Any]:
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            halves = tensor.view(heads, 2, -1, tensor.shape[-1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.contiguous().numpy()
