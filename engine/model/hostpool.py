"""KV blocks in host memory: the bytes behind engine/hostcache.py."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt
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

    Beside a CUDA card the memory is pinned, so that copies neither wait nor stop the stream. Beside a CPU it is taken
    when first written, and copied by this thread alone: waking torch's threads for every block costs 40 times the copy
    when others use the cores.
    """

    def __init__(self, cache: BlockStore, num_slots: int) -> None:
        self.num_slots = num_slots
        self._view = cache.block_view
        shape = (num_slots, self._view.shape[0], *self._view.shape[2:])
        self._on_card = self._view.device.type == "cuda"
        self._slots = _memory(shape, self._view.dtype, pinned=self._on_card)

    @property
    def num_bytes(self) -> int:
        """Size when every slot has been written."""
        return self._slots.numel() * self._slots.element_size()

    def copy_out(self, pairs: Seq[tuple[int, int]]) -> None:
        """Save blocks: (device block, host slot)."""
        if not self._on_card:
            blocks, slots = _as_bytes(self._view), _as_bytes(self._slots)
            for block, slot in pairs:
                slots[slot] = blocks[:, block]
            return
        for block, slot in pairs:
            # Only contiguous memory crosses without waiting.
            self._slots[slot].copy_(self._view[:, block].contiguous(), non_blocking=True)

    def copy_in(self, pairs: Seq[tuple[int, int]]) -> None:
        """Bring blocks back: (host slot, device block)."""
        if not self._on_card:
            blocks, slots = _as_bytes(self._view), _as_bytes(self._slots)
            for slot, block in pairs:
                blocks[:, block] = slots[slot]
            return
        for slot, block in pairs:
            self._view[:, block] = self._slots[slot].to(self._view.device, non_blocking=True)


def _as_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array


def _memory(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    # calloc'ed pages take no memory before they are written, unlike those of torch.empty after a fault.
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
