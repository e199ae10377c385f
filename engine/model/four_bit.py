"""4-bit weights as GGUF's Q4_0 and Q4_1 store them: nothing is rounded on their way to the fused path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Q4_0, Q4_1 = 2, 3
"""GGML's type numbers."""
BLOCK = 32


@dataclass(slots=True)
class FourBit:
    """w = scale * v + base per row and block of 32 inputs.

    values [n, k / 32, 16] uint8, low nibbles are inputs 0 to 15 of the block, high nibbles 16 to 31; scale and base
    [n, k / 32] float16.
    """

    values: Tensor
    scale: Tensor
    base: Tensor

    def map(self, rows: Callable[[Tensor], Tensor]) -> FourBit:
        """The same rows in another order."""
        return FourBit(rows(self.values), rows(self.scale), rows(self.base))

    def floats(self) -> Tensor:
        """[n, k] float32."""
        nibbles = torch.cat((self.values & 15, self.values >> 4), -1)
        blocks = nibbles.float() * self.scale.float()[..., None] + self.base.float()[..., None]
        return blocks.flatten(1)


def read_four_bit(raw: npt.NDArray[np.uint8], ggml_type: int) -> FourBit | None:
    """Rows of stored bytes [n, bytes] as 4-bit weights; None for any other type."""
    if ggml_type not in (Q4_0, Q4_1):
        return None
    size = 18 if ggml_type == Q4_0 else 20
    blocks = torch.from_numpy(np.array(raw)).view(len(raw), -1, size)
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    # Q4_0 is d * (v - 8), and 8 * d is exact.
    base = scale * -8 if ggml_type == Q4_0 else blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]
    return FourBit(blocks[..., size - 16 :].contiguous(), scale.contiguous(), base.contiguous())


def stack(parts: Sequence[FourBit]) -> FourBit:
    """Rows of several matrices, one after the other."""
    return FourBit(*(torch.cat([getattr(part, name) for part in parts]) for name in FourBit.__slots__))
