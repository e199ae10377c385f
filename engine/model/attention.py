"""Paged attention in plain torch: gather the blocks a group of rows needs, then SDPA.

Every group is `batch` sequences × `span` query tokens padded to `blocks` KV blocks. Decode is
span = 1 with many sequences; a prefill tile is one sequence with many tokens. Heads that share a
KV head are stacked as query rows, so KV is never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.types import Chunk

TILE = 256
"""Rows of one prefill tile: a tile skips the keys after its own last row."""


@dataclass(slots=True)
class AttentionGroup:
    """Rows [start, stop) of the token batch that attend together.

    blocks: [batch × blocks] block ids; mask: [1, batch, group × span, blocks × block_size],
    0 where a row may look and −inf elsewhere.
    """

    start: int
    stop: int
    batch: int
    blocks: Tensor
    mask: Tensor


class KVCache:
    """Keys and values of all blocks, per layer [2 × kv_heads, num_blocks, block_size, head_dim]."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2 * num_kv_heads, num_blocks, block_size, head_dim)
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.data = (
            _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )

    @property
    def block_view(self) -> Tensor:
        """[layers × 2 × kv_heads, num_blocks, block_size, head_dim]: see BlockStore."""
        return self.data.flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        """Size when every block has been touched."""
        return self.data.numel() * self.data.element_size()

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store kv [tokens, 2 × kv_heads, head_dim] at slot = block × block_size + offset."""
        flat = self.data[layer].view(2 * self.num_kv_heads, -1, self.head_dim)
        flat.index_copy_(1, slots, kv.transpose(0, 1))

    def read(self, layer: int, group: AttentionGroup) -> tuple[Tensor, Tensor]:
        """Keys and values of a group, each [kv_heads, batch, padded length, head_dim]."""
        heads = self.num_kv_heads
        both = self.data[layer].index_select(1, group.blocks)
        both = both.view(2 * heads, group.batch, -1, self.head_dim)
        return both[:heads], both[heads:]


def attend(cache: KVCache, layer: int, query: Tensor, groups: Seq[AttentionGroup]) -> Tensor:
    """Attention of query [tokens, heads, head_dim]; returns [tokens, heads × head_dim]."""
    outputs = [_attend_group(cache, layer, query, group) for group in groups]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_group(cache: KVCache, layer: int, query: Tensor, group: AttentionGroup) -> Tensor:
    keys, values = cache.read(layer, group)
    kv_heads, batch, head_dim = cache.num_kv_heads, group.batch, cache.head_dim
    rows = query[group.start : group.stop].view(batch, -1, kv_heads, query.shape[1] // kv_heads, head_dim)
    span, shared = rows.shape[1], rows.shape[3]
    stacked = rows.permute(2, 0, 3, 1, 4).reshape(kv_heads, batch, shared * span, head_dim)
    out = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=group.mask)
    out = out.view(kv_heads, batch, shared, span, head_dim).permute(1, 3, 0, 2, 4)
    return out.reshape(batch * span, -1)


def plan_groups(
    chunks: Seq[Chunk], block_size: int, shared: int, dtype: torch.dtype, device: torch.device
) -> list[AttentionGroup]:
    """Cut a batch into groups. Single-token chunks come first, sorted by length."""
    groups: list[AttentionGroup] = []
    row = index = 0
    while index < len(chunks):
        taken = _bucket(chunks, index, block_size)
        for first, last in _tiles(chunks[index].count):
            batch = [(chunk, chunk.start + first, chunk.start + last) for chunk in taken]
            groups.append(_group(row, batch, block_size, shared, dtype, device))
            row = groups[-1].stop
        index += len(taken)
    return groups


def _bucket(chunks: Seq[Chunk], index: int, block_size: int) -> Seq[Chunk]:
    """Decode chunks from `index` whose padding at most doubles the shortest, or one prefill."""
    if chunks[index].count > 1:
        return chunks[index : index + 1]
    limit = max(2 * chunks[index].end, 16 * block_size)
    stop = index
    while stop < len(chunks) and chunks[stop].count == 1 and chunks[stop].end <= limit:
        stop += 1
    return chunks[index:stop]


def _tiles(count: int) -> list[tuple[int, int]]:
    return [(first, min(first + TILE, count)) for first in range(0, count, TILE)]


def _group(
    row: int,
    batch: list[tuple[Chunk, int, int]],
    block_size: int,
    shared: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    span = batch[0][2] - batch[0][1]
    width = max(-(-last // block_size) for _, _, last in batch)
    blocks = np.zeros((len(batch), width), np.int64)
    starts = np.empty((len(batch), 1), np.int64)
    for at, (chunk, first, last) in enumerate(batch):
        used = -(-last // block_size)
        blocks[at, :used] = chunk.sequence.block_table[:used]
        starts[at] = first
    positions = torch.from_numpy(starts + np.arange(span)).to(device)
    hidden = torch.arange(width * block_size, device=device) > positions[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
    mask = mask[:, None].expand(-1, shared, -1, -1).reshape(1, len(batch), shared * span, -1)
    flat = torch.from_numpy(blocks.reshape(-1)).to(device)
    return AttentionGroup(row, row + len(batch) * span, len(batch), flat, mask)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once written: calloc'ed pages, unlike torch.zeros.

    Unwritten slots are read by padded gathers, so they must be finite, not arbitrary.
    """
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
