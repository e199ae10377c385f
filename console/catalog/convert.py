"""A GGUF model as a folder of safetensors, for engines that do not read GGUF: `python -m console.catalog.convert`.

A process of its own, without Django: it takes as much memory as the weights in BF16. Says `progress N` on stdout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import EngineError
from engine.model.loader import open_source
from engine.model.names import hf_name
from engine.model.source import Source
from engine.model.tensors import expected_tensors
from engine.tokenizer import Tokenizer, load_tokenizer

SHARD_BYTES = 4 << 30
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class CannotConvert(Exception):
    """This model cannot be written as safetensors; the message says why."""


def convert(source_path: Path, target: Path, percent: Callable[[int], None]) -> None:
    """Write the folder `target`: weights dequantised to BF16, config, tokenizer, chat template. All of it or nothing.

    Raises CannotConvert, and engine.errors.EngineError for a model that our own engine does not read either.
    """
    source = open_source(source_path)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tokenizer = load_tokenizer(source.metadata, source_path)
        _write(partial / "config.json", config_of(source, tokenizer))
        _write_tokenizer(partial, source.metadata, tokenizer)
        _write_weights(partial, source, percent)
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def config_of(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json in the words of transformers. Raises CannotConvert for a rope scaling that it has no words for."""
    shape = source.config
    if shape.rope_scaling is not None and "factors" in shape.rope_scaling:
        raise CannotConvert("Its positions are scaled by factors of its own, which config.json cannot hold.")
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta, **(shape.rope_scaling or {})}
    biased = source.has("q_bias", 0)
    return {
        "architectures": [_CLASSES[shape.architecture]],
        "model_type": shape.architecture,
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": biased and shape.architecture != "qwen2",
        "tie_word_embeddings": source.tied,
        "sliding_window": shape.sliding_window,
        "use_sliding_window": shape.sliding_window is not None,
        "bos_token_id": tokenizer.special.bos_id,
        "eos_token_id": sorted(tokenizer.special.end_ids),
    }


def _write_tokenizer(folder: Path, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    special = tokenizer.special
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    names = {"bos_token": special.bos_token or None, "eos_token": special.eos_token or None}
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names},
    )
    ids = {"bos_token_id": special.bos_id, "eos_token_id": sorted(special.end_ids)}
    _write(folder / "generation_config.json", {name: value for name, value in ids.items() if value is not None})


def _write_weights(folder: Path, source: Source, percent: Callable[[int], None]) -> None:
    """Shard by shard, so that no more than one is in memory; their names need their number, so they are moved last."""
    expected = list(expected_tensors(source))
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    total = size = 0
    for done, (name, layer, _shape) in enumerate(expected):
        tensor = source.load(name, layer).to(torch.bfloat16).contiguous()
        bytes_ = tensor.numel() * tensor.element_size()
        if shard and size + bytes_ > SHARD_BYTES:
            _flush(folder, shard, shards)
            shard, size = {}, 0
        shard[hf_name(name, layer, "model.")] = tensor
        size, total = size + bytes_, total + bytes_
        percent(100 * done // len(expected))
    _flush(folder, shard, shards)
    _name_shards(folder, shards, total)


def _flush(folder: Path, shard: dict[str, Tensor], shards: list[list[str]]) -> None:
    save_file(shard, folder / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
    shards.append(list(shard))


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / "part-0.safetensors").replace(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}.safetensors").replace(folder / file)
        where |= dict.fromkeys(names, file)
    _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def main() -> int:
    """Convert once. What cannot be is said on stderr, with status 2."""
    parser = argparse.ArgumentParser(prog="console.catalog.convert")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)

    def percent(done: int) -> None:
        sys.stdout.write(f"progress {done}\n")
        sys.stdout.flush()

    try:
        convert(options.source, options.target, percent)
    except (CannotConvert, EngineError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
