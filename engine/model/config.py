"""The shape of a decoder, from GGUF metadata or a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel
from engine.model.rope import Rotary, Scaling, rotary, stretched_window

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


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
    rope_scaling: Scaling | None = None
    sliding_window: int | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def rotary(self) -> Rotary:
        """What positions turn queries and keys by, scaling applied."""
        return rotary(self.rope_theta, self.head_dim, self.rope_scaling)

    def check_window(self, window: int) -> None:
        """Raises UnsupportedModel where attention would have to slide: here every token sees all before it."""
        if self.sliding_window is not None and self.sliding_window < window:
            raise UnsupportedModel(
                f"The model attends to the last {self.sliding_window} tokens only, which this engine does not do; "
                f"up to there it makes no difference: set max_model_len to {self.sliding_window}."
            )

    def check(self) -> ModelConfig:
        """Itself. Raises UnsupportedModel for sizes that do not fit together, and for its rope scaling."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"The model's {name} is {getattr(self, name)}.")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise UnsupportedModel(
                f"{self.num_heads} query heads over {self.num_kv_heads} KV heads of {self.head_dim} do not fit."
            )
        self.rotary()
        return self


def config_from_gguf(meta: Mapping[str, Any], vocab_size: int, factors: list[float] | None = None) -> ModelConfig:
    """Read a GGUF header's `<architecture>.*` keys; `factors` are its rope factors, if it has any."""
    arch = str(meta.get("general.architecture"))
    _require_architecture(arch)

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise UnsupportedModel(f"The GGUF file lacks {arch}.{key}.")
        return value

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    _refuse_gguf_variants(meta, arch, head_dim)
    window = int(get("context_length"))
    scaling = _gguf_scaling(meta, arch, window, factors)
    return ModelConfig(
        architecture=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=int(get("block_count")),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position=stretched_window(scaling, window),
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        sliding_window=meta.get(f"{arch}.attention.sliding_window") or None,
    ).check()


def _refuse_gguf_variants(meta: Mapping[str, Any], arch: str, head_dim: int) -> None:
    """What would load, and answer wrongly."""
    turned = meta.get(f"{arch}.rope.dimension_count", head_dim)
    if turned != head_dim:
        raise UnsupportedModel(f"Rotary positions on {turned} of {head_dim} dimensions are not supported.")
    if meta.get(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("Values of another size than keys are not supported.")
    if meta.get(f"{arch}.expert_count"):
        raise UnsupportedModel("Mixtures of experts are not supported; vLLM serves them.")
    if meta.get(f"{arch}.attention.causal", True) is False:
        raise UnsupportedModel("Attention that looks ahead is not supported.")
    for key, neutral in (("attention.scale", None), ("logit_scale", None), ("residual_scale", None)):
        if meta.get(f"{arch}.{key}", neutral) != neutral:
            raise UnsupportedModel(f"{arch}.{key} is not supported.")


def _gguf_scaling(meta: Mapping[str, Any], arch: str, window: int, factors: list[float] | None) -> Scaling | None:
    """Scaling in the words of config.json."""

    def get(key: str) -> Any:
        return meta.get(f"{arch}.rope.scaling.{key}")

    kind = get("type") or "none"
    factor = get("factor")
    if kind == "none" and meta.get(f"{arch}.rope.scale_linear"):  # the key of older files
        kind, factor = "linear", meta[f"{arch}.rope.scale_linear"]
    scaling: dict[str, Any] = {} if factors is None else {"factors": factors}
    if kind != "none":
        scaling |= {"rope_type": kind, "factor": factor or 1.0}
    if kind == "yarn":
        scaling |= _gguf_yarn(meta, arch, window, float(factor or 1.0))
    return scaling or None


def _gguf_yarn(meta: Mapping[str, Any], arch: str, window: int, factor: float) -> Scaling:
    """Yarn's other values. llama.cpp multiplies the paper's sharpening with its own factor."""

    def get(key: str) -> Any:
        return meta.get(f"{arch}.rope.scaling.{key}")

    if get("yarn_log_multiplier") or get("yarn_ext_factor") not in (None, 1.0):
        raise UnsupportedModel("Yarn with yarn_log_multiplier or yarn_ext_factor is not supported.")
    given = {
        "original_max_position_embeddings": get("original_context_length") or window,
        "beta_fast": get("yarn_beta_fast"),
        "beta_slow": get("yarn_beta_slow"),
    }
    more = float(get("attn_factor") or get("yarn_attn_factor") or 1.0)
    paper = rotary(10000.0, 64, {"rope_type": "yarn", "factor": factor, **given}).magnitude
    return {**given, "attention_factor": paper * more}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config.json (both its older and its 5.x rope spelling)."""
    arch = str(raw.get("model_type"))
    _require_architecture(arch)
    _refuse_variants(raw)
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        scaling = _hf_scaling(raw)
        theta = raw.get("rope_theta") or (scaling or {}).get("rope_theta") or 10000.0
        return ModelConfig(
            architecture=arch,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            max_position=stretched_window(scaling, int(raw["max_position_embeddings"])),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            rope_scaling=scaling,
            sliding_window=_hf_sliding_window(raw),
        ).check()
    except KeyError as error:
        raise UnsupportedModel(f"config.json lacks {error.args[0]}.") from error


def _hf_scaling(raw: Mapping[str, Any]) -> Scaling | None:
    """Rope parameters; those without an original window mean the config's."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    if not rope:
        return None
    window = raw.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    return {"original_max_position_embeddings": window} | {k: v for k, v in rope.items() if v is not None}


def _hf_sliding_window(raw: Mapping[str, Any]) -> int | None:
    """Mistral slides where it names a window, the others where they say so as well."""
    window = raw.get("sliding_window")
    return int(window) if window and raw.get("use_sliding_window", raw["model_type"] == "mistral") else None


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    """What would load, and answer wrongly."""
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else "unknown"
        raise UnsupportedModel(
            f"Weights quantised by {method!r} are not supported: give the full weights or a GGUF file, or use vLLM."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"Activation {raw['hidden_act']!r} is not supported; silu is.")
    rope = raw.get("rope_parameters") or {}
    if float(raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("Rotary positions on a part of each head are not supported.")
    if raw.get("num_local_experts") or raw.get("num_experts"):
        raise UnsupportedModel("Mixtures of experts are not supported; vLLM serves them.")


def _require_architecture(arch: str) -> None:
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"Architecture {arch!r} is not supported; known: {known}.")
