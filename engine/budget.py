"""How much one step may compute: tokens, and the work they cost at their place in the context."""

from __future__ import annotations

from math import isqrt

UNIT = 1024
"""A token costs 1, and 1 more for every `UNIT` tokens it attends to."""

UNCUT = 1536
"""A chunk as large as the whole token budget still fits when it starts here, so prompts of 2,048 tokens run in 4 steps
of 512. Further on chunks shrink: 158 tokens at 8,000, where 512 would hold up their batch mates three times as long."""

MIN_CHUNK = 16
"""However long the context or dear the decodes, a prompt advances by so much."""


class Budget:
    """What is left of a step. Work is counted in tokens × 2 UNIT, which keeps it in whole numbers:

    tokens a to b cost Σ (1 + position / UNIT) = ((b + UNIT)² − (a + UNIT)²) / (2 UNIT).
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._work = _cost(UNCUT, UNCUT + tokens)

    def spend(self, start: int, count: int) -> None:
        """Take the tokens from `start` into the step."""
        self.tokens -= count
        self._work -= _cost(start, start + count)

    def fitting(self, start: int, count: int) -> int:
        """How many of `count` tokens from `start` fit; 0 only when no token is left."""
        affordable = isqrt((start + UNIT) ** 2 + max(self._work, 0)) - UNIT - start
        return min(count, self.tokens, max(affordable, MIN_CHUNK))


def _cost(start: int, end: int) -> int:
    return (end + UNIT) ** 2 - (start + UNIT) ** 2
