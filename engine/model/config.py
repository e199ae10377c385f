"""The shape of a decoder, from GGUF metadata or a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a dense decoder with grouped-query attention and rotary positions."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def inverse_frequencies(self) -> list[float]:
        """Rotary frequency of each of the head_dim / 2 pairs, scaling applied."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-2 * i / self.head_dim) for i in range(half)]
        return scale_frequencies(plain, self.rope_scaling)


def scale_frequencies(plain: list[float], scaling: Mapping[str, Any] | None) -> list[float]:
    """Apply `linear` or `llama3` rope scaling; raises UnsupportedModel for others."""
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    if scaling is None or kind == "default":
        return plain
    if kind == "linear":
        return [f / float(scaling["factor"]) for f in plain]
    if kind == "factors":
        return [f / float(by) for f, by in zip(plain, scaling["factors"], strict=True)]
    if kind == "llama3":
        return [_llama3_frequency(f, scaling) for f in plain]
    raise UnsupportedModel(f"Rope scaling {kind!r} is not supported; linear and llama3 are.")


def _llama3_frequency(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Long wavelengths are stretched, short ones kept, those between are blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    blend = (turns - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency


def config_from_gguf(meta: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """Read a GGUF header's `<architecture>.*` keys."""
    arch = str(meta.get("general.architecture"))
    _require_architecture(arch)

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise UnsupportedModel(f"The GGUF file lacks {arch}.{key}.")
        return value

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    return ModelConfig(
        architecture=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=int(get("block_count")),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=int(get("attention.key_length", hidden // heads)),
        max_position=int(get("context_length")),
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=_gguf_scaling(meta, arch),
    )


def _gguf_scaling(meta: Mapping[str, Any], arch: str) -> Mapping[str, Any] | None:
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": meta.get(f"{arch}.rope.scaling.factor", 1.0)}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config.json (both its older and its 5.x rope spelling)."""
    arch = str(raw.get("model_type"))
    _require_architecture(arch)
    _refuse_variants(raw)
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    theta = raw.get("rope_theta") or (rope or {}).get("rope_theta") or 10000.0
    return ModelConfig(
        architecture=arch,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        max_position=int(raw["max_position_embeddings"]),
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=rope,
    )


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    """Sliding windows and quantised checkpoints would load, and answer wrongly."""
    if raw.get("use_sliding_window"):
        raise UnsupportedModel("Sliding-window attention is not supported.")
    if raw.get("quantization_config"):
        raise UnsupportedModel("Quantised safetensors are not supported; use GGUF or full weights.")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"Activation {raw['hidden_act']!r} is not supported; silu is.")


def _require_architecture(arch: str) -> None:
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"Architecture {arch!r} is not supported; known: {known}.")
