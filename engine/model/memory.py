"""Host memory that is taken when first written and can be given back block by block."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable

from torch import Tensor

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def give_back(store: Tensor, runs: Iterable[tuple[int, int]]) -> None:
    """Let the system have the memory of blocks nobody uses; they take memory again when written.

    Args:
        store: contiguous [groups, num_blocks, …] (see BlockStore). On a card it is one allocation, and stays whole.
        runs: first block, and how many.
    """
    if store.device.type != "cpu":
        return
    block = store[0, 0].numel() * store.element_size()
    group = block * store.shape[1]
    for first, count in runs:
        for index in range(store.shape[0]):
            start = store.data_ptr() + index * group + first * block
            _give_back(start, start + count * block)


def _give_back(start: int, end: int) -> None:
    """Whole pages only: what shares one with a block in use stays."""
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and _libc.madvise(start, end - start, mmap.MADV_DONTNEED):
        log.warning("memory of KV blocks cannot be given back: %s", os.strerror(ctypes.get_errno()))
