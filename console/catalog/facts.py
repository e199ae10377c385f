"""Facts of a model, read from its own files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from console.catalog.files import Inspected, read_header
from engine.errors import UnsupportedModel
from engine.model.gguf_file import GgufFile

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class Unreadable(Exception):
    """The files do not tell what a model needs to tell; the message says what is missing."""


@dataclass(frozen=True)
class Facts:
    """What the catalog shows of a model. Sizes in elements and bytes."""

    format: str
    architecture: str
    parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    quantisation: str
    dtype: str
    disk_bytes: int
    weights_bytes: int
    licence: str = ""
    weights_by_type: dict[str, int] = field(default_factory=dict)


def read(inspected: Inspected) -> Facts:
    """Read config and headers; the weights themselves stay on disk. Raises Unreadable."""
    try:
        return read_gguf(inspected.path) if inspected.format == "gguf" else _read_safetensors(inspected)
    except (
        UnsupportedModel, LookupError, TypeError, ValueError, OSError, ArithmeticError, AttributeError, RecursionError,
    ) as error:  # fmt: skip
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise Unreadable(f"Its facts cannot be read: {what}.") from error


def read_gguf(path: Path) -> Facts:
    """Read the header and tensor list of a GGUF file."""
    file = GgufFile(path)
    meta = file.metadata
    architecture = str(meta["general.architecture"])

    def size(name: str, default: Any = None) -> int:
        value = meta.get(f"{architecture}.{name}", default)
        if value is None:
            raise KeyError(f"{architecture}.{name}")
        return int(max(value) if isinstance(value, list) else value)

    by_type: dict[str, int] = {}
    parameters = 0
    for tensor in file.tensors.values():
        kind = GGMLQuantizationType(tensor.ggml_type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = math.prod(tensor.shape)
        parameters += elements
        by_type[kind.name] = by_type.get(kind.name, 0) + elements // block * block_bytes
    heads, hidden = size("attention.head_count"), size("embedding_length")
    main = _largest(by_type)
    return Facts(
        format="gguf",
        architecture=architecture,
        parameters=parameters,
        layers=size("block_count"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=size("attention.key_length", hidden // heads),
        intermediate_size=size("feed_forward_length", 0),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        context_length=size("context_length"),
        quantisation=main,
        dtype={"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(main, ""),
        disk_bytes=path.stat().st_size,
        weights_bytes=sum(by_type.values()),
        licence=str(meta.get("general.license", ""))[:64],
        weights_by_type=by_type,
    )


def _read_safetensors(inspected: Inspected) -> Facts:
    raw = json.loads((inspected.path / "config.json").read_text("utf-8"))
    config = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else raw
    by_type, parameters = _tensors(inspected.weights, _packed_bits(raw))
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    method = (raw.get("quantization_config") or {}).get("quant_method", "")
    return Facts(
        format="safetensors",
        architecture=str(config.get("model_type") or raw["model_type"]),
        parameters=parameters,
        layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate_size=int(config.get("intermediate_size") or 0),
        vocab_size=int(config["vocab_size"]),
        context_length=int(config["max_position_embeddings"]),
        quantisation=str(method).upper()[:16] or _NAMES.get(dtype, _largest(by_type)),
        dtype=dtype[:16],
        disk_bytes=sum(file.size for file in inspected.files),
        weights_bytes=sum(by_type.values()),
        licence=_licence(inspected.path),
        weights_by_type=by_type,
    )


def _tensors(files: Sequence[Path], packed_bits: int) -> tuple[dict[str, int], int]:
    """Bytes by type of tensor, and how many parameters they are; several of them share an integer where packed."""
    by_type: dict[str, int] = {}
    parameters = 0
    for path in files:
        for name, tensor in read_header(path).items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            kind, elements = str(tensor["dtype"]), math.prod(tensor["shape"])
            by_type[kind] = by_type.get(kind, 0) + end - start
            if name.endswith("qweight") and packed_bits:
                parameters += elements * _BYTES[kind] * 8 // packed_bits
            elif not name.endswith(("scales", "qzeros", "g_idx", "weight_scale", "input_scale")):
                parameters += elements
    return by_type, parameters


def _packed_bits(config: Mapping[str, Any]) -> int:
    quantised = config.get("quantization_config") or {}
    return int(quantised.get("bits") or quantised.get("w_bit") or 0)


def _licence(folder: Path) -> str:
    """What the model card's head says, or the first line of a licence file."""
    for card in ("README.md", "LICENSE", "LICENSE.txt"):
        try:
            with (folder / card).open(encoding="utf-8", errors="replace") as file:
                head = file.read(20_000)
        except OSError:
            continue
        if card != "README.md":
            return next((line.strip() for line in head.splitlines() if line.strip()), "")[:64]
        front = re.match(r"---\n(.*?)\n---", head, re.DOTALL)
        named = re.search(r"^license:[ \t]*(\S.*)$", front[1], re.MULTILINE) if front else None
        if named:
            return named[1].strip().strip("'\"")[:64]
    return ""


def _largest(by_type: Mapping[str, int]) -> str:
    """The type that most bytes have."""
    return max(by_type, key=lambda kind: by_type[kind]) if by_type else ""
