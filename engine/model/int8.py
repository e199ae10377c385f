"""Matrices in 8 bits for the plain path: half the memory of 16 bits, products in 16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_ROWS = 16
"""Up to here torch's own 8-bit product is faster on a CPU; beyond, a product with widened weights is."""
WIDENED = 1 << 24
"""Elements that are widened at a time: a large head is never there in 16 bits as a whole."""


@dataclass(slots=True)
class Int8Matrix:
    """[n, k] weights as data [n, k] int8 × scale [n], in the type that products are computed in."""

    data: Tensor
    scale: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """What products are computed in."""
        return self.scale.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.data.device

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and scales."""
        return self.data.numel() + self.scale.numel() * self.scale.element_size()

    def lookup(self, rows: Tensor) -> Tensor:
        """Rows [tokens, k] as float32."""
        return self.data[rows].float().mul_(self.scale[rows].float()[:, None])

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, k] · weightsᵀ + bias, [rows, n]."""
        if self.device.type == "cpu" and 0 < len(x) <= PACKED_ROWS and self.dtype == torch.bfloat16:
            out: Tensor = torch._weight_int8pack_mm(x, self.data, self.scale)
        else:
            tiles = torch.split(self.data, max(1, WIDENED // self.data.shape[1]))
            parts = [F.linear(x, tile.to(x.dtype)) for tile in tiles]
            out = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(self.scale)
        return out if bias is None else out.add_(bias)


def quantise(matrix: Tensor, dtype: torch.dtype) -> Int8Matrix:
    """Round each row of a float32 matrix to 127ths of its largest value."""
    # The scale is rounded to `dtype` before it is used, so that no row as a whole becomes larger or smaller.
    scale = (matrix.abs().amax(1) / 127).clamp(min=1e-30).to(dtype)
    return Int8Matrix((matrix / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale)
