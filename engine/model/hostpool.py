"""KV blocks in host memory: the bytes behind engine/hostcache.py."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class BlockStore(Protocol):
    """A KV cache of any layout whose blocks can be copied."""

    @property
    def block_view(self) -> Tensor:
        """A view [groups, num_blocks, …] such that `block_view[:, b]` is all of block b's data."""
        ...


class HostPool:
    """Slots of one block each, contiguous. Copies run on the device's current stream, in the order they are asked for.

    Beside a CUDA card the memory is pinned, so that copies neither wait nor stop the stream; beside a CPU it is taken
    when first written.
    """

    def __init__(self, cache: BlockStore, num_slots: int) -> None:
        self.num_slots = num_slots
        self._view = cache.block_view
        shape = (num_slots, self._view.shape[0], *self._view.shape[2:])
        self._slots = _memory(shape, self._view.dtype, pinned=self._view.device.type == "cuda")

    @property
    def num_bytes(self) -> int:
        """Size when every slot has been written."""
        return self._slots.numel() * self._slots.element_size()

    def copy_out(self, pairs: Seq[tuple[int, int]]) -> None:
        """Save blocks: (device block, host slot)."""
        for block, slot in pairs:
            self._slots[slot].copy_(self._contiguous(block), non_blocking=True)

    def copy_in(self, pairs: Seq[tuple[int, int]]) -> None:
        """Bring blocks back: (host slot, device block)."""
        device = self._view.device
        for slot, block in pairs:
            self._view[:, block] = self._slots[slot].to(device, non_blocking=True)

    def _contiguous(self, block: int) -> Tensor:
        """Only contiguous memory crosses to the host without waiting; beside a CPU nothing crosses."""
        data = self._view[:, block]
        return data if data.device.type == "cpu" else data.contiguous()


def _memory(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    # calloc'ed pages take no memory before they are written, unlike those of torch.empty after a fault.
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
