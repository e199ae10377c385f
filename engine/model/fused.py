"""Weights and cache of the fused CPU path, in the layouts that engine/native reads."""

from __future__ import annotations

import ctypes as c
import mmap
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.decoder import LayerWeights
from engine.model.four_bit import FourBit
from engine.model.layers import rope_table
from engine.native.build import NativeUnavailable
from engine.native.library import PARTS, Layer, Matrix, Model, Step

PANEL = 16
GROUP = 64
TILE = 16
HEAD_DIMS = (64, 128)
MAX_TOKENS = 32_768
"""Of a step: threads.h counts the tasks of a product in 20 bits."""


def unsupported(config: ModelConfig, block_size: int, max_tokens: int) -> str | None:
    """Why the fused path cannot run a model of this shape in steps of so many tokens, or None."""
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim is {config.head_dim}; it takes 64 or 128"
    if config.hidden_size % 64 or config.intermediate_size % 64:
        return "hidden and intermediate sizes must be multiples of 64"
    if config.hidden_size > 8192 or config.group > 48:
        return "hidden size above 8,192 or more than 48 query heads per KV head"
    if block_size % TILE:
        return f"block_size is {block_size}; it takes multiples of {TILE}"
    if max_tokens > MAX_TOKENS:
        return f"max_num_batched_tokens is {max_tokens}; it takes up to {MAX_TOKENS}"
    return None


class Arena:
    """Memory in huge pages, where the system grants them: weights are streamed through once per step."""

    REGION = 64 << 20

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in the arena."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > len(self._region):
            self._region, self._used = huge_zeros(max(size, self.REGION)), 0
        kept = self._region[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // 64) * 64
        return kept.copy_(tensor)


def huge_zeros(size: int) -> Tensor:
    """Zero bytes [size] that take memory only once written, in huge pages where the system grants them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(slots=True)
class PackedMatrix:
    """Int8 weights per output channel, in panels of sixteen channels.

    data [n / 16, k / 4, 16, 4] uint8 (weight + 128), sum [n / 16, k / 64, 16] int16 (over groups of 64 inputs),
    scale [n] float32.
    """

    data: Tensor
    sum: Tensor
    scale: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, sums and scales."""
        return self.data.numel() + self.sum.numel() * 2 + self.scale.numel() * 4

    def struct(self) -> Matrix:
        """For the C interface; the tensors must be kept alive."""
        n, k = len(self.scale), self.data.shape[1] * 4
        return Matrix(self.data.data_ptr(), self.sum.data_ptr(), self.scale.data_ptr(), None, n, k)

    def dequantised(self) -> Tensor:
        """The weights as float32 [n, k], as the products see them."""
        values = self.data.permute(0, 2, 1, 3).reshape(len(self.scale), -1)
        return (values.float() - 128) * self.scale[:, None]


@dataclass(slots=True)
class FourBitMatrix:
    """4-bit weights in panels of sixteen channels, as engine/native/four_bit.h has them.

    data [n / 16, k / 64, 2, 4, 16, 4] uint8 of two nibbles; params [n / 16, k / 64, 80] float16: scale [2, 16],
    base + 8 * scale [2, 16], sum of the group's weights [16].
    """

    data: Tensor
    params: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and parameters."""
        return self.data.numel() + self.params.numel() * 2

    def struct(self) -> Matrix:
        """For the C interface; the tensors must be kept alive."""
        panels, groups = self.data.shape[:2]
        return Matrix(self.data.data_ptr(), None, None, self.params.data_ptr(), panels * PANEL, groups * GROUP)


Packed = PackedMatrix | FourBitMatrix


def pack_four_bit(matrix: FourBit, arena: Arena) -> FourBitMatrix:
    """Lay 4-bit weights out in panels; n is a multiple of 16 and k of 64."""
    n, blocks = matrix.scale.shape
    data = matrix.values.view(-1, PANEL, blocks // 2, 2, 4, 4).permute(0, 2, 3, 4, 1, 5)
    middle = (matrix.base.float() + 8 * matrix.scale.float()).half()
    sums = matrix.floats().view(n, blocks // 2, GROUP).sum(-1).half()
    halves = [part.view(-1, PANEL, blocks // 2, 2).permute(0, 2, 3, 1).flatten(2) for part in (matrix.scale, middle)]
    params = torch.cat((*halves, sums.view(-1, PANEL, blocks // 2).transpose(1, 2)), 2)
    return FourBitMatrix(arena.keep(data), arena.keep(params))


def pack(matrix: Tensor, arena: Arena) -> PackedMatrix:
    """Quantise [n, k] floats per output channel (absmax / 127); n is padded to whole panels with zeros."""
    n, k = matrix.shape
    if n % PANEL:
        matrix = F.pad(matrix, (0, 0, 0, -n % PANEL))
    scale = matrix.abs().amax(1).float() / 127
    values = (matrix * (1 / scale.clamp(min=1e-30))[:, None]).round_().to(torch.int8)
    sums = values.view(-1, PANEL, k // GROUP, GROUP).sum(-1, dtype=torch.int16).transpose(1, 2)
    data = (values.view(torch.uint8) ^ 128).view(-1, PANEL, k // 4, 4).transpose(1, 2)
    return PackedMatrix(arena.keep(data), arena.keep(sums), scale)


def alternate(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of two [n, …] matrices in turns of one panel, so that a task has both halves of its channels."""
    rest = gate.shape[1:]
    return torch.stack((gate.view(-1, PANEL, *rest), up.view(-1, PANEL, *rest)), 1).reshape(-1, *rest)


@dataclass(slots=True)
class FusedLayer:
    """One layer; norms, bias and qk_norm are float32."""

    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed
    attn_norm: Tensor
    mlp_norm: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None

    def struct(self) -> Layer:
        """For the C interface."""
        matrices = (m.struct() for m in (self.qkv, self.out, self.gate_up, self.down))
        vectors = (_address(v) for v in (self.attn_norm, self.mlp_norm, self.qkv_bias, self.qk_norm))
        return Layer(*matrices, *vectors)


@dataclass(slots=True)
class FusedWeights:
    """All weights: embedding bfloat16 [vocab, hidden], norm float32, the rest packed."""

    embedding: Tensor
    layers: list[FusedLayer]
    norm: Tensor
    head: PackedMatrix

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        packed: list[Packed] = [self.head]
        packed += [m for x in self.layers for m in (x.qkv, x.out, x.gate_up, x.down)]
        return self.embedding.numel() * 2 + sum(m.num_bytes for m in packed)


def pack_layer(layer: LayerWeights[Tensor], arena: Arena, stored: StoredLayer | None = None) -> FusedLayer:
    """A layer in the library's layouts; its matrices are float32. `stored` has those that the file keeps in 4 bits."""
    four = stored or StoredLayer()
    gate, up = layer.gate_up.chunk(2)
    return FusedLayer(
        qkv=_pack_either(layer.qkv, four.qkv, arena),
        out=_pack_either(layer.out, four.out, arena),
        gate_up=_pack_either(alternate(gate, up), four.gate_up and four.gate_up.map(_alternate_halves), arena),
        down=_pack_either(layer.down, four.down, arena),
        attn_norm=layer.attn_norm,
        mlp_norm=layer.mlp_norm,
        qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias.float(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.contiguous(),
    )


@dataclass(slots=True)
class StoredLayer:
    """A layer's matrices as the file has them, where it has them in 4 bits."""

    qkv: FourBit | None = None
    out: FourBit | None = None
    gate_up: FourBit | None = None
    down: FourBit | None = None


def _pack_either(matrix: Tensor, stored: FourBit | None, arena: Arena) -> Packed:
    return pack(matrix, arena) if stored is None else pack_four_bit(stored, arena)


def _alternate_halves(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2)
    return alternate(gate, up)


class FusedCache:
    """Keys and values of all blocks as bfloat16 [layers, num_blocks, elements of a block], touched lazily."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        per_block = 2 * block_size * config.num_kv_heads * config.head_dim
        raw = huge_zeros(config.num_layers * num_blocks * per_block * 2)
        self.data = raw.view(torch.bfloat16).view(config.num_layers, num_blocks, per_block)

    @property
    def num_bytes(self) -> int:
        """Size when every block has been touched."""
        return self.data.numel() * 2

    @property
    def block_view(self) -> Tensor:
        """`block_view[:, block]` is everything a block holds; what swapping copies."""
        return self.data


class FusedModel:
    """A model on the library: starts steps and waits for them. Raises NativeUnavailable."""

    def __init__(
        self,
        library: c.CDLL,
        config: ModelConfig,
        weights: FusedWeights,
        cache: FusedCache,
        *,
        max_len: int,
        max_tokens: int,
        threads: int,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.max_tokens = max_tokens
        self.parts: dict[str, float] = {}
        self._under_way: tuple[Step, object] | None = None
        self._library = library
        cos, sin = rope_table(config.rotary(), max_len, torch.device("cpu"))
        half = config.head_dim // 2
        self._keep: list[Any] = [cos[:, 0, :half].contiguous(), sin[:, 0].contiguous()]
        layers = (Layer * len(weights.layers))(*(layer.struct() for layer in weights.layers))
        model = self._model(layers, max_tokens, threads)
        self._keep += [layers, model]
        self._engine: int | None = library.fl_create(c.byref(model))
        if self._engine is None:
            raise NativeUnavailable("the system refuses it memory, threads, or the tile registers that AMX needs")
        self._ms = (c.c_double * len(PARTS))()

    def start(self, step: Step, arrays: object) -> None:
        """Begin a step; `arrays` hold what it points to and are kept alive until it has been computed."""
        self.settle()
        self._under_way = (step, arrays)
        self._library.fl_start(self._engine, c.byref(step))

    def settle(self) -> None:
        """Wait for a step that nobody waited for, because something failed in between."""
        if self._under_way is not None:
            self.release()
            self.wait()

    def release(self) -> None:
        """The masks of the step under way are filled; it chooses no token before that."""
        assert self._under_way is not None
        self._under_way[0].masked = 1

    def wait(self) -> None:
        """Block, without the GIL, until the step is computed; then `parts` has its milliseconds."""
        self._library.fl_wait(self._engine, self._ms)
        self._under_way = None
        self.parts = dict(zip(PARTS, self._ms, strict=True))

    def close(self) -> None:
        """End the library's threads, which may not wait for masks any more."""
        self.settle()
        if self._engine is not None:
            self._library.fl_destroy(self._engine)
            self._engine = None

    def _model(self, layers: Any, max_tokens: int, threads: int) -> Model:
        config, cos_sin = self.config, self._keep[:2]
        return Model(
            config.hidden_size,
            config.intermediate_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            self.cache.num_blocks,
            self.cache.block_size,
            max_tokens,
            threads,
            config.rms_eps,
            self.weights.embedding.data_ptr(),
            self.weights.norm.data_ptr(),
            *(table.data_ptr() for table in cos_sin),
            c.addressof(layers),
            self.weights.head.struct(),
            self.cache.data.data_ptr(),
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
