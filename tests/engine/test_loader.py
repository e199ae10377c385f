"""Weights come from GGUF or safetensors only, and unusable files say why."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ModelError, UnsafeWeights, UnsupportedModel
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
