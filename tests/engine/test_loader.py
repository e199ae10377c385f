"""Weights come from GGUF or safetensors only, and unusable files say why."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen3Config, Qwen3ForCausalLM

from engine.boot import build
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError, UnsafeWeights, UnsupportedModel, WrongChecksum
from engine.model.checksums import verify_checksums
from engine.model.config import config_from_gguf, config_from_hf
from engine.model.gguf_file import GgufFile
from engine.model.loader import load_model, open_source

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "weights.pkl", "model.ckpt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UnsafeWeights):
        open_source(tmp_path / name)
    with pytest.raises(UnsafeWeights):
        open_source(tmp_path)


def test_missing_and_empty_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        open_source(tmp_path / "nothing")
    with pytest.raises(UnsupportedModel, match="no .safetensors"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"NOPE" + bytes(60),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1 << 40),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 50),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    ],
)
def test_a_broken_gguf_is_unsupported_not_a_crash(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel):
        open_source(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_each_quantisation_is_read_as_the_gguf_package_reads_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(values, quant)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("words", ["a", "é"])
    writer.add_tensor("t", data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.metadata["numbers"] == [1, 2, 3]
    assert file.metadata["words"] == ["a", "é"]
    assert file.tensors["t"].shape == (4, 64)
    np.testing.assert_array_equal(file.load("t"), gguf.quants.dequantize(data, quant))


def test_loading_reports_progress_to_the_end(bundled_model: Path) -> None:
    seen: list[float] = []
    model = load_model(bundled_model, torch.bfloat16, CPU, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert model.weights.head is model.weights.embedding
    assert model.weights.num_bytes == pytest.approx(2 * 134_515_008, rel=0.001)


HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def test_a_config_without_kv_heads_has_one_per_query_head() -> None:
    config = config_from_hf(HF)
    assert (config.num_kv_heads, config.head_dim, config.group) == (4, 16, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "Architecture 'mamba'"),
        *(
            ({"quantization_config": {"quant_method": method}}, f"quantised by '{method}' are not .* or use vLLM")
            for method in ("awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors")
        ),
        ({"hidden_act": "gelu"}, "Activation 'gelu'"),
    ],
)
def test_variants_that_would_answer_wrongly_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_from_hf(HF | change)


def test_a_gguf_without_a_needed_key_names_it() -> None:
    with pytest.raises(UnsupportedModel, match="llama.embedding_length"):
        config_from_gguf({"general.architecture": "llama", "llama.attention.head_count": 4}, 10)


def test_a_folder_with_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UnsupportedModel, match="not a JSON object"):
        open_source(tmp_path)


# -- What a file holds, against what its config promises -------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama in one safetensors file."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    open_source(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> None:
    """Change tensors and config of a saved model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | config))


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(LAYER + "mlp.up_proj.weight"), "lack model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("lm_head.weight"), "lack lm_head.weight"),
        (
            lambda t: t.update({LAYER + "self_attn.k_proj.weight": torch.zeros(64, 64)}),
            r"model.layers.1.self_attn.k_proj.weight has the shape \[64, 64\]; the config wants \[32, 64\]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model.norm.weight has the shape \[63\]"),
        (lambda t: t.update({LAYER + "self_attn.o_proj.bias": torch.ones(64)}), "o_proj.bias is not part of a dense"),
        (lambda t: t.update({LAYER + "mlp.down_proj.bias": torch.ones(64)}), "down_proj.bias is not part"),
        (lambda t: t.update({LAYER + "mlp.gate.weight": torch.ones(8, 64)}), "mlp.gate.weight is not part"),
        (lambda t: t.update({LAYER + "mlp.experts.0.up_proj.weight": torch.ones(8, 64)}), "experts.0.up_proj.weight"),
        (lambda t: t.update({LAYER + "self_attn.q_norm.weight": torch.ones(16)}), "q_norm.weight is not part"),
        (lambda t: t.update({LAYER + "self_attn.q_proj.bias": torch.ones(64)}), "lack .*k_proj.bias"),
        (lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}), "layers.2.input_layernorm"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(UnsupportedModel, match=message):
        open_source(folder)


def test_what_follows_from_the_config_anyway_may_be_stored(folder: Path) -> None:
    """Old checkpoints hold rotary frequencies; a tied model may hold its head."""
    rewrite(
        folder,
        lambda t: t.update({LAYER + "self_attn.rotary_emb.inv_freq": torch.ones(8)}),
        tie_word_embeddings=True,
    )
    assert not open_source(folder).has("head")


def test_a_qwen3_without_its_norms_is_refused(tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)).save_pretrained(tmp_path)
    open_source(tmp_path)
    rewrite(tmp_path, lambda t: t.pop(LAYER + "self_attn.k_norm.weight"))
    with pytest.raises(UnsupportedModel, match="lack model.layers.1.self_attn.k_norm.weight"):
        open_source(tmp_path)


def test_a_decoder_saved_without_a_head_has_none(tmp_path: Path) -> None:
    """As embedding models are: the outer name is missing too."""
    LlamaModel(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert source.headless
    assert source.shape("q", 1) == (64, 64)


def test_integers_are_refused_by_name(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({LAYER + "mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"up_proj.weight is torch.int8; .* vLLM reads more"):
        load_model(folder, torch.float32, CPU)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The same over several files, with an index."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    load_model(tmp_path, torch.float32, CPU)
    return tmp_path


def test_a_missing_shard_is_named(shards: Path) -> None:
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UnsupportedModel, match=f"{gone.name} is missing; model.safetensors.index.json lists it"):
        open_source(shards)


def test_a_cut_shard_is_named(shards: Path) -> None:
    cut = sorted(shards.glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-5])
    with pytest.raises(UnsupportedModel, match=f"{cut.name} is not a whole safetensors file"):
        open_source(shards)


def test_a_tensor_that_is_not_where_the_index_has_it_is_named(shards: Path) -> None:
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="model.extra is not in model-"):
        open_source(shards)


def test_an_index_cannot_point_outside_its_folder(shards: Path) -> None:
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(UnsupportedModel, match="outside its folder"):
        open_source(shards)


def test_files_beside_those_of_the_index_are_not_read(shards: Path) -> None:
    (shards / "consolidated.safetensors").write_bytes(b"something else")
    open_source(shards)


def test_without_an_index_two_files_may_not_hold_the_same_tensor(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(data)
    (folder / "b.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedModel, match="in another file as well"):
        open_source(folder)
    assert open_source(folder / "a.safetensors").config.vocab_size == 40


def test_a_gguf_that_ends_early_names_the_tensor(bundled_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(bundled_model.read_bytes()[: -(1 << 20)])
    with pytest.raises(UnsupportedModel, match=r"The file ends inside .*\.weight: \d+ bytes of it are missing"):
        open_source(cut)


def test_a_gguf_split_over_files_says_how_to_join_it(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="one of 3 parts: join them"):
        open_source(path)


def test_an_unknown_type_of_a_gguf_tensor_is_named(bundled_model: Path, tmp_path: Path) -> None:
    """The type follows name and shape in the header; 200 is none."""
    data = bytearray(bundled_model.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 200)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"blk.0.ffn_up.weight has the unknown type 200"):
        open_source(path)


# -- Checksums -------------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    return path


DIGEST = hashlib.sha256(b"weights").hexdigest()


def test_a_file_is_compared_with_what_was_told_and_with_the_lists_beside_it(weights: Path) -> None:
    assert verify_checksums(weights, None) == []
    assert verify_checksums(weights, DIGEST.upper()) == ["m.gguf"]
    Path(f"{weights}.sha256").write_text(DIGEST + "\n")
    (weights.parent / "SHA256SUMS").write_text(f"{'0' * 64}  other.gguf\n{DIGEST} *./m.gguf\n")
    assert verify_checksums(weights, None) == ["m.gguf"]


@pytest.mark.parametrize("name", ["SHA256SUMS", "m.gguf.sha256"])
def test_another_file_than_listed_is_refused(weights: Path, name: str) -> None:
    (weights.parent / name).write_text(f"{'0' * 64}  m.gguf\n")
    for model in (weights, weights.parent):
        with pytest.raises(WrongChecksum, match=f"m.gguf is damaged or another file: .* {DIGEST}, not that of {name}"):
            verify_checksums(model, None)


def test_a_checksum_that_was_told_is_held_against_the_file(weights: Path) -> None:
    with pytest.raises(WrongChecksum, match="not that of the setting model_sha256"):
        verify_checksums(weights, "0" * 64)
    with pytest.raises(ConfigError, match="put a SHA256SUMS into it"):
        verify_checksums(weights.parent, DIGEST)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{'0' * 64}  gone.safetensors", "gone.safetensors is missing; SHA256SUMS lists it"),
        ("nonsense", "no checksum: 'nonsense'"),
        (f"{'0' * 64}  ../elsewhere", "outside its folder"),
    ],
)
def test_a_list_that_cannot_be_followed_is_refused(weights: Path, line: str, message: str) -> None:
    (weights.parent / "SHA256SUMS").write_text(line + "\n")
    with pytest.raises(WrongChecksum, match=message):
        verify_checksums(weights.parent, None)


def test_a_damaged_model_stops_the_start(bundled_model: Path) -> None:
    with pytest.raises(WrongChecksum):
        build(EngineConfig(bundled_model, model_sha256="0" * 64))
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        EngineConfig(bundled_model, model_sha256="abc")
