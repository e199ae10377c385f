"""A runner without a model: its next token is a hash of all tokens read through the block table."""

from __future__ import annotations

from hashlib import blake2b

from engine.grammar import NO_MASKS, Masks
from engine.sequence import Sequence
from engine.types import Sampled, Step

VOCAB = 97


def next_token(tokens: list[int]) -> int:
    """The oracle: what must follow these tokens."""
    digest = blake2b(repr(tokens).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


class HashRunner:
    """Keeps "KV" as one token per slot, so that a wrong block anywhere changes the output."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.computed_tokens = 0

    def forward(self, step: Step) -> object:
        """Write every chunk, then read back the whole of each sequence that samples."""
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.end):
                slot = self._slot(chunk.sequence, position)
                self.slots[slot] = chunk.sequence.tokens[position]
            self.computed_tokens += chunk.count
        return {
            chunk.sequence.id: Sampled(next_token(self._read(chunk.sequence))) for chunk in step.chunks if chunk.samples
        }

    def sample(self, step: Step, computed: object, masks: Masks = NO_MASKS) -> dict[int, Sampled]:
        """What forward read."""
        assert isinstance(computed, dict)
        return computed

    def _slot(self, sequence: Sequence, position: int) -> int:
        block = sequence.block_table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _read(self, sequence: Sequence) -> list[int]:
        read = [self.slots[self._slot(sequence, at)] for at in range(sequence.num_tokens)]
        assert None not in read, "a slot was read before it was written"
        return [token for token in read if token is not None]


def oracle(prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The tokens a request must get, whatever else runs."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]
