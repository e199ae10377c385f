"""How much memory a replica takes, from the sizes of its model and the bytes of its files. Pure: no torch, no device.

Four terms: weights as the engine holds them, KV in whole blocks, activations of the largest step, and an overhead of
the runtime (interpreter, libraries, CUDA context), which no formula knows: it is learnt from earlier runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30
PANEL = 16
"""Output channels that the fused path packs together; a matrix is padded to whole panels."""
SOUND_UTILISATION = (0.85, 0.92)
_PER_ELEMENT = {"Q4_0": 18 / 32, "Q4_1": 20 / 32}  # bytes, as GGUF stores them
_HALF_STORED = {"F32", "FLOAT32"}  # stored in 32 bits, held by vLLM in 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, from its config, and bytes of its tensors as its files store them.

    `by_type` is bytes by type of tensor ("Q4_1", "BF16"); where it is empty all of `weights_bytes` is of one kind.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    parameters: int
    weights_bytes: int
    context: int
    by_type: Mapping[str, int] = field(default_factory=dict)

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """[n, k] of the matrices of one layer, as the embedded engine joins them: qkv, out, gate and up, down."""
        queries = self.heads * self.head_dim
        return [
            (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            (self.hidden, queries),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def linear_elements(self) -> int:
        """Elements of the matrices of all layers: what quantisation makes smaller."""
        return self.layers * sum(n * k for n, k in self.layer_matrices)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding; told by the number of parameters."""
        return self.parameters < self.linear_elements + 1.5 * self.vocab * self.hidden

    @property
    def four_bit_share(self) -> float:
        """Of the layers' elements, how many the file stores in the 4 bits that the embedded engine keeps."""
        stored = sum(self.by_type.get(kind, 0) / size for kind, size in _PER_ELEMENT.items())
        return min(1.0, stored / self.linear_elements) if self.linear_elements else 0.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device, by part."""

    weights: int
    kv: int
    activations: int
    overhead: int

    @property
    def total(self) -> int:
        """The peak need, without any buffer."""
        return self.weights + self.kv + self.activations + self.overhead

    def parts(self) -> dict[str, int]:
        """The same as a mapping, in the order it is drawn."""
        return {"weights": self.weights, "activations": self.activations, "kv": self.kv, "overhead": self.overhead}


@dataclass(frozen=True, slots=True)
class DefaultOverhead:
    """What a runtime takes beside weights, KV and activations, before any run has taught better."""

    bytes: int
    source: str


DEFAULT_OVERHEADS: Mapping[tuple[str, str], DefaultOverhead] = {
    ("embedded", "cpu"): DefaultOverhead(
        320 << 20, "measured: 300 MiB of private memory beside the weights, SmolLM2-135M at ready"
    ),
    ("embedded", "gpu"): DefaultOverhead(600 << 20, "assumed: a CUDA context and torch's kernels"),
    ("vllm", "cpu"): DefaultOverhead(1536 << 20, "assumed: two processes with torch and vLLM"),
    ("vllm", "gpu"): DefaultOverhead(1536 << 20, "assumed: CUDA context, captured graphs, workspaces"),
    ("sglang", "gpu"): DefaultOverhead(1536 << 20, "assumed: as vLLM"),
    ("trtllm", "gpu"): DefaultOverhead(2048 << 20, "assumed: CUDA context and the engine's own workspaces"),
}
FALLBACK_OVERHEAD = DefaultOverhead(1536 << 20, "assumed")


def default_overhead(engine: str, kind: str) -> DefaultOverhead:
    """The overhead of an engine on a kind of device ("cpu", "gpu") of which no run has been seen."""
    return DEFAULT_OVERHEADS.get((engine, kind), FALLBACK_OVERHEAD)


def estimate(
    shape: Shape,
    *,
    engine: str,
    quantisation: str = "",
    kv_dtype_bytes: float = 2,
    block_size: int = 16,
    concurrency: int,
    tokens: int,
    max_num_batched_tokens: int,
    overhead: int | None = None,
    tensor_parallel: int = 1,
    kind: str = "gpu",
) -> Footprint:
    """Peak need on each of `tensor_parallel` devices, for `concurrency` requests of `tokens` tokens at once.

    `quantisation` is the engine's word ("int8", "fp8", "q4"); empty: as stored. `overhead` is in bytes; None: the
    default of the engine on that `kind` of device.
    """
    return Footprint(
        weights=held_weights(shape, engine=engine, quantisation=quantisation, kind=kind) // tensor_parallel,
        kv=kv_bytes(shape, concurrency, tokens, block_size, kv_dtype_bytes, tensor_parallel),
        activations=activation_bytes(shape, engine, max_num_batched_tokens, concurrency) // tensor_parallel,
        overhead=default_overhead(engine, kind).bytes if overhead is None else overhead,
    )


# -- weights ----------------------------------------------------------------------------------------------------------


def held_weights(shape: Shape, *, engine: str, quantisation: str = "", kind: str = "gpu") -> int:
    """Bytes of all weights as the engine holds them in memory, on all devices together."""
    if engine == "embedded":
        return _embedded_weights(shape, quantisation or "auto", kind)
    stored = _stored_in_16_bits(shape)
    if stored < 1.6 * shape.parameters:  # quantised by whoever made the files
        return stored
    kept, linear = kept_bytes(shape), shape.linear_elements
    if quantisation in ("fp8", "int8", "w8a8"):
        return min(stored, kept + linear)
    if quantisation in ("awq", "gptq", "int4", "w4a16"):
        return min(stored, kept + _four_bit_bytes(linear))
    return stored


def kept_bytes(shape: Shape) -> int:
    """What quantisation leaves in 16 bits: embedding, head, norms and biases."""
    return 2 * max(0, shape.parameters - shape.linear_elements)


def _stored_in_16_bits(shape: Shape) -> int:
    """The files' bytes; 32-bit floats are held in 16 bits."""
    if not shape.by_type:
        return shape.weights_bytes
    halves = sum(size for kind, size in shape.by_type.items() if kind.upper() in _HALF_STORED)
    return sum(shape.by_type.values()) - halves // 2


def _four_bit_bytes(elements: int) -> int:
    """4 bits each, with a 16-bit scale and a 4-bit zero for every 128."""
    return elements // 2 + elements // 128 * 2 + elements // 256


def _embedded_weights(shape: Shape, dtype: str, kind: str) -> int:
    if dtype in ("bf16", "fp32") or (dtype == "auto" and not _fused(shape, kind)):
        return _plain_weights(shape, 4 if dtype == "fp32" else 2)
    if not _fused(shape, kind):
        matrices = shape.layers * sum(n * k + 2 * n for n, k in shape.layer_matrices)
        tables = (1 if shape.tied else 2) * shape.vocab * (shape.hidden + 2)
        return matrices + tables + _norm_bytes(shape)
    four_bit = 0.0 if dtype == "int8" else shape.four_bit_share
    layer_8 = sum(_packed(n, k) for n, k in shape.layer_matrices)
    layer_4 = sum(_packed_four_bit(n, k) for n, k in shape.layer_matrices)
    layers = shape.layers * (layer_8 + four_bit * (layer_4 - layer_8))
    return int(layers) + 2 * shape.vocab * shape.hidden + _packed(shape.vocab, shape.hidden)


def _fused(shape: Shape, kind: str) -> bool:
    """Whether the embedded engine's own kernels take a model of this shape; as engine.model.fused says."""
    sizes = shape.hidden % 64 == 0 and shape.intermediate % 64 == 0 and shape.hidden <= 8192
    return kind == "cpu" and shape.head_dim in (64, 128) and sizes and shape.heads // shape.kv_heads <= 48


def _plain_weights(shape: Shape, size: int) -> int:
    tables = (1 if shape.tied else 2) * shape.vocab * shape.hidden
    return size * (shape.linear_elements + tables) + _norm_bytes(shape)


def _norm_bytes(shape: Shape) -> int:
    return 4 * shape.hidden * (2 * shape.layers + 1)


def _packed(n: int, k: int) -> int:
    """Int8 in panels, 16-bit sums of groups of 64 and a 32-bit scale per channel: engine.model.fused.PackedMatrix."""
    n = -(-n // PANEL) * PANEL
    return n * k + 2 * n * (k // 64) + 4 * n


def _packed_four_bit(n: int, k: int) -> int:
    """Nibbles, and 80 half floats for 16 channels × 64 inputs: engine.model.fused.FourBitMatrix."""
    return n * k // 2 + (n // PANEL) * (k // 64) * 80 * 2


# -- KV and activations -----------------------------------------------------------------------------------------------


def kv_bytes_per_token(shape: Shape, kv_dtype_bytes: float = 2, tensor_parallel: int = 1) -> int:
    """Keys and values of one token over all layers, on one device; a KV head is never cut in two."""
    heads = max(1, shape.kv_heads // tensor_parallel)
    return int(shape.layers * 2 * heads * shape.head_dim * kv_dtype_bytes)


def kv_bytes(
    shape: Shape, concurrency: int, tokens: int, block_size: int, kv_dtype_bytes: float = 2, tensor_parallel: int = 1
) -> int:
    """KV of `concurrency` requests of `tokens` tokens, in whole blocks, on one device."""
    blocks = concurrency * -(-tokens // block_size)
    return blocks * block_size * kv_bytes_per_token(shape, kv_dtype_bytes, tensor_parallel)


def activation_bytes(shape: Shape, engine: str, max_num_batched_tokens: int, concurrency: int) -> int:
    """What the largest step needs beside weights and KV: rows of the widest layer, and logits of all who sample."""
    size = 4 if engine == "embedded" else 2  # the embedded engine's residual and products are in 32 bits
    queries = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    row = size * (4 * shape.hidden + 2 * queries + 3 * shape.intermediate)
    return max_num_batched_tokens * row + 2 * 4 * min(concurrency, max_num_batched_tokens) * shape.vocab


# -- what a pool buys -------------------------------------------------------------------------------------------------


def kv_pool(total: int, utilisation: float, footprint: Footprint) -> int:
    """Bytes that an engine which takes `utilisation` of a device at start has left for KV; 0 where there is no room.

    total − weights − activations − reserve, where the reserve is what it must not take and the runtime's overhead.
    """
    reserve = int(total * (1 - utilisation)) + footprint.overhead
    return max(0, total - footprint.weights - footprint.activations - reserve)


def buys(
    pool: int, shape: Shape, tokens: int, block_size: int, kv_dtype_bytes: float = 2, tensor_parallel: int = 1
) -> int:
    """How many requests of `tokens` tokens a pool holds at once."""
    each = kv_bytes(shape, 1, tokens, block_size, kv_dtype_bytes, tensor_parallel)
    return pool // each if each else 0


def utilisation_warning(value: float) -> str | None:
    """Why a gpu_memory_utilization is unsound, or None."""
    low, high = SOUND_UTILISATION
    if value > high:
        return (
            f"gpu_memory_utilization {value:g} is above {high:g}: fragmentation and a few bytes of others can then "
            "end the engine in the middle of a burst."
        )
    if value < low:
        return f"gpu_memory_utilization {value:g} is below {low:g}: the rest of the card serves nobody else by itself."
    return None


# -- advice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """One kind of weights for a model of this size. `saved` is the share of its 16-bit bytes, at most 0.75."""

    quantisation: str  # "", "int8", "fp8", "awq", "gptq"
    name: str
    bytes: int
    saved: float
    advised: bool
    text: str


_BANDS: tuple[tuple[float, frozenset[str]], ...] = (  # billions of parameters up to → what is advised
    (13, frozenset(("", "int8"))),
    (70, frozenset(("int8", "awq"))),
    (float("inf"), frozenset(("awq", "gptq"))),
)
_TEXTS = {
    "": "The reference: nothing is lost.",
    "int8": "Almost no loss, up to 60–80 % more throughput by published figures.",
    "fp8": "As INT8, with native compute on cards that have it (H100, L40S and newer); widened elsewhere.",
    "awq": "Acceptable loss; the choice where memory is short. 4 bits cannot save more than 75 %.",
    "gptq": "As AWQ, on more cards and with slower kernels on some engines.",
}


def advice(parameters: int, weights_bytes: int, kept: int = 0) -> list[Advice]:
    """Kinds of weights for a model, in the order of their size, with bytes reckoned from its real files.

    Args:
        parameters: of the model.
        weights_bytes: of its tensors, as stored; where they are quantised already, 16 bits a parameter are the whole.
        kept: bytes that stay in 16 bits whatever is chosen (see `kept_bytes`).
    """
    full = weights_bytes if weights_bytes >= 1.9 * parameters else 2 * parameters
    linear = max(0, full - kept) // 2  # elements
    sizes = {
        "": full,
        "int8": kept + linear,
        "fp8": kept + linear,
        "awq": kept + _four_bit_bytes(linear),
        "gptq": kept + _four_bit_bytes(linear),
    }
    band = next(advised for bound, advised in _BANDS if parameters <= bound * 1e9)
    names = {"": "FP16/BF16", "int8": "INT8", "fp8": "FP8", "awq": "AWQ 4-bit", "gptq": "GPTQ 4-bit"}
    return [
        Advice(kind, names[kind], size, 1 - size / full if full else 0.0, kind in band, _TEXTS[kind])
        for kind, size in sizes.items()
    ]
