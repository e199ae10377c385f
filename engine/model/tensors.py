"""Whether a file holds the tensors that its config promises: all of them, no others, each of the right shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.errors import UnsupportedModel
from engine.model.config import ModelConfig
from engine.model.names import harmless
from engine.model.source import Source

BIASES = ("q_bias", "k_bias", "v_bias")
QK_NORMS = ("q_norm", "k_norm")


class Expected(NamedTuple):
    """A tensor by its key in the tables of names, and its shape."""

    name: str
    layer: int | None
    shape: tuple[int, ...]


def check_tensors(source: Source) -> None:
    """Raises UnsupportedModel naming the first tensor that is missing, of another shape, or unknown."""
    known = set()
    for tensor in expected_tensors(source):
        full = source.full_name(tensor.name, tensor.layer)
        known.add(full)
        found = source.shape(tensor.name, tensor.layer)
        if found is None:
            raise UnsupportedModel(f"The weights lack {full}.")
        if found != tensor.shape:
            raise UnsupportedModel(f"{full} has the shape {list(found)}; the config wants {list(tensor.shape)}.")
    known.add(source.full_name("head", None))  # stored, but not used, where the config ties it
    for full in sorted(source.stored()):
        if full not in known and not harmless(full):
            raise UnsupportedModel(f"{full} is not part of a dense {source.config.architecture} as it is known here.")


def expected_tensors(source: Source) -> Iterator[Expected]:
    """All tensors that the model must have."""
    config = source.config
    hidden, vocab = config.hidden_size, config.vocab_size
    yield Expected("embed", None, (vocab, hidden))
    yield Expected("norm", None, (hidden,))
    if not source.tied:
        yield Expected("head", None, (vocab, hidden))
    for layer in range(config.num_layers):
        for name, shape in _layer(config, bias=any(source.has(name, layer) for name in BIASES)).items():
            yield Expected(name, layer, shape)


def _layer(config: ModelConfig, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer. Biases of query, key and value come together; Qwen2 always has them."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "out": (hidden, queries),
        "mlp_norm": (hidden,),
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
    }
    if bias or config.architecture == "qwen2":
        shapes |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if config.architecture == "qwen3":
        shapes |= dict.fromkeys(QK_NORMS, (config.head_dim,))
    return shapes
