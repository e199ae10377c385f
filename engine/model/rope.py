"""Rotary positions: the frequency of each pair, stretched for contexts longer than those of the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.errors import UnsupportedModel

Scaling = Mapping[str, Any]


class Rotary(NamedTuple):
    """Frequencies of the head_dim / 2 pairs, and what cosines and sines are multiplied with."""

    frequencies: list[float]
    magnitude: float = 1.0


def rotary(theta: float, head_dim: int, scaling: Scaling | None) -> Rotary:
    """Frequencies as the model's scaling has them. Raises UnsupportedModel."""
    kind = rope_type(scaling)
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return Rotary(plain)
    if "factors" in scaling:  # a GGUF file lists them where the model's own scaling has been worked out
        if len(scaling["factors"]) != len(plain):
            raise UnsupportedModel(f"Rope factors: {len(plain)} are needed, not {len(scaling['factors'])}.")
        plain = [f / float(by) for f, by in zip(plain, scaling["factors"], strict=True)]
    try:
        return _scaled(kind, plain, theta, scaling)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedModel(f"Rope scaling {kind!r} lacks a value, or has a wrong one: {error}.") from error


def rope_type(scaling: Scaling | None) -> str:
    """The kind of scaling, under either of the names its key has had."""
    given = scaling or {}
    return str(given.get("rope_type") or given.get("type") or "default")


def stretched_window(scaling: Scaling | None, window: int) -> int:
    """How far the model reaches: with yarn, configs give the window of the training."""
    if scaling is None or rope_type(scaling) != "yarn":
        return window
    original = scaling.get("original_max_position_embeddings") or window
    return max(window, int(original * float(scaling.get("factor") or 1.0)))


def _scaled(kind: str, plain: list[float], theta: float, scaling: Scaling) -> Rotary:
    # "dynamic" stretches only beyond the window in the config, which no sequence leaves here.
    if kind in ("default", "dynamic"):
        return Rotary(plain)
    if kind == "linear":
        return Rotary([f / float(scaling["factor"]) for f in plain])
    if kind == "llama3":
        return Rotary([_llama3_frequency(f, scaling) for f in plain])
    if kind == "yarn":
        return Rotary(_yarn_frequencies(plain, theta, scaling), _yarn_magnitude(scaling))
    if kind in ("longrope", "su"):
        raise UnsupportedModel(
            f"Rope scaling {kind!r} is not supported: it turns keys otherwise once the context has grown, "
            "and cached keys are shared between short and long contexts."
        )
    raise UnsupportedModel(f"Rope scaling {kind!r} is not supported; linear, dynamic, yarn and llama3 are.")


def _llama3_frequency(frequency: float, scaling: Scaling) -> float:
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


def _yarn_frequencies(plain: list[float], theta: float, scaling: Scaling) -> list[float]:
    """Pairs that turn often within the original window are kept, slow ones stretched, a ramp lies between."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    head_dim = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(float(scaling.get("beta_fast") or 32))
    high = pair_that_turns(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretch = [min(max((pair - low) / span, 0.0), 1.0) for pair in range(len(plain))]
    return [f / factor * by + f * (1 - by) for f, by in zip(plain, stretch, strict=True)]


def _yarn_magnitude(scaling: Scaling) -> float:
    """Given, or by the paper's rule: attention over a longer context is made sharper."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def sharpen(by: float) -> float:
        factor = float(scaling["factor"])
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return sharpen(float(over)) / sharpen(float(under)) if over and under else sharpen(1.0)
