"""What a decoder's tensors are called in either kind of file, and which of them a file may have besides."""

from __future__ import annotations

import re

GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "out": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
HF_NAMES = {
    "embed": "embed_tokens.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}

ROPE_FACTORS = "rope_freqs.weight"
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Older checkpoints store frequencies, which follow from the config."""


def harmless(name: str) -> bool:
    """True for a tensor that changes nothing when it is left out."""
    return name == ROPE_FACTORS or _DERIVED.fullmatch(name) is not None


def gguf_name(name: str, layer: int | None) -> str:
    """A tensor's name in a GGUF file."""
    return GGUF_NAMES[name] if layer is None else f"blk.{layer}.{GGUF_NAMES[name]}"


def hf_name(name: str, layer: int | None, prefix: str) -> str:
    """A tensor's name in safetensors; `prefix` is empty where the decoder was saved without its head."""
    if name == "head":
        return HF_NAMES[name]
    return prefix + (HF_NAMES[name] if layer is None else f"layers.{layer}.{HF_NAMES[name]}")
