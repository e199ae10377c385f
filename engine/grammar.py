"""What a constrained choice may say next: the seam between the scheduler and a grammar library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

Masks = Mapping[int, npt.NDArray[np.int32]]
"""By sequence id: bit `t % 32` of word `t // 32` is 1 where token t is allowed; [ceil(vocab / 32)] words."""

NO_MASKS: Masks = {}


class Grammar(Protocol):
    """The state of one choice's constraint.

    `ready` and `error` are set by the compiling thread; everything else belongs to the step thread. Only accepted
    tokens are state, so preemption needs no replay.
    """

    @property
    def ready(self) -> bool:
        """True once compiled or failed; until then the sequence waits and blocks nobody."""
        ...

    @property
    def error(self) -> str | None:
        """Why it could not be compiled, or None."""
        ...

    @property
    def ended(self) -> bool:
        """True when the text is complete and nothing but an end token may follow."""
        ...

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Write the tokens allowed next into a row of `Masks`."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token, which the mask allowed."""
        ...
