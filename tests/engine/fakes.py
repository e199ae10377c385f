"""A runner without a model: its next token is a hash of all tokens read through the block table."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from engine.grammar import NO_MASKS, Masks
from engine.sequence import Sequence
from engine.types import Sampled, Step

VOCAB = 97


def next_token(tokens: list[int]) -> int:
    """The oracle: what must follow these tokens."""
    digest = blake2b(bytes(tokens), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


class HashRunner:
    """Keeps "KV" as one token per slot, so that a wrong block anywhere changes the output.

    Copies move those slots to and from a host of the same kind, out before in before the chunks, as a device must.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host: int = 0) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.host: list[list[int] | None] = [None] * num_host
        self.computed_tokens = 0

    def forward(self, step: Step) -> object:
        """Copy, write every chunk, then read back the whole of each sequence that samples."""
        self._copy(step)
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.end):
                slot = self._slot(chunk.sequence, position)
                self.slots[slot] = chunk.sequence.tokens[position]
            self.computed_tokens += chunk.count
        return {
            chunk.sequence.id: Sampled(next_token(self._read(chunk.sequence))) for chunk in step.chunks if chunk.samples
        }

    def sample(self, step: Step, computed: object, masks: Masks = NO_MASKS) -> dict[int, Sampled]:
        """What forward read; where a mask forbids it, the next token that is allowed."""
        assert isinstance(computed, dict)
        return {id: Sampled(allowed(token.token_id, masks.get(id))) for id, token in computed.items()}

    def give_back(self, runs: list[tuple[int, int]]) -> None:
        """What was in these blocks is gone."""
        for first, count in runs:
            self.slots[first * self.block_size : (first + count) * self.block_size] = [None] * count * self.block_size

    def _copy(self, step: Step) -> None:
        written: set[int] = set()
        for block, slot in step.copies_out:
            assert slot not in written, "two blocks were saved to one slot"
            written.add(slot)
            content = self.slots[block * self.block_size : (block + 1) * self.block_size]
            assert None not in content, "a block was saved before it was full"
            self.host[slot] = [token for token in content if token is not None]
        filled: set[int] = set()
        for slot, block in step.copies_in:
            content_in = self.host[slot]
            assert content_in is not None, "a slot was read before it was written"
            assert block not in filled, "a block was filled twice"
            filled.add(block)
            self.slots[block * self.block_size : (block + 1) * self.block_size] = content_in

    def _slot(self, sequence: Sequence, position: int) -> int:
        block = sequence.block_table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _read(self, sequence: Sequence) -> list[int]:
        size, read = self.block_size, list[int | None]()
        for block in sequence.block_table:
            read += self.slots[block * size : (block + 1) * size]
        read = read[: sequence.num_tokens]
        assert None not in read, "a slot was read before it was written"
        return [token for token in read if token is not None]


def allowed(token: int, mask: npt.NDArray[np.int32] | None) -> int:
    """The token, or the next one after it that the mask allows."""
    if mask is None:
        return token
    return next(t for t in [*range(token, VOCAB), *range(token)] if int(mask[t // 32]) & 0xFFFFFFFF & (1 << t % 32))


class EvenGrammar:
    """Allows even tokens until `length` of them were accepted, then 96 only. Ready when told."""

    def __init__(self, length: int, *, ready: bool = True) -> None:
        self.ready = ready
        self.error: str | None = None
        self.accepted: list[int] = []
        self._length = length

    @property
    def ended(self) -> bool:
        return len(self.accepted) >= self._length

    def allows(self, token: int) -> bool:
        return token == VOCAB - 1 if self.ended else token % 2 == 0

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        for word in range(len(mask)):
            bits = sum(1 << t % 32 for t in range(word * 32, min(word * 32 + 32, VOCAB)) if self.allows(t))
            mask[word] = np.uint32(bits).view(np.int32)

    def accept(self, token_id: int) -> None:
        assert self.allows(token_id), f"{token_id} was not allowed"
        self.accepted.append(token_id)


def oracle(
    prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset(), grammar: EvenGrammar | None = None
) -> list[int]:
    """The tokens a request must get, whatever else runs."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = next_token(tokens)
        if grammar is not None:
            token = next(t for t in [*range(token, VOCAB), *range(token)] if grammar.allows(t))
        tokens.append(token)
        if token in stop:
            break
        if grammar is not None:
            grammar.accept(token)
    return tokens[len(prompt) :]


def masks_of(step: Step) -> Masks:
    """What the step loop fills in for sequences with a grammar."""
    masks = {}
    for chunk in step.chunks:
        if chunk.samples and chunk.sequence.grammar is not None:
            masks[chunk.sequence.id] = np.zeros(-(-VOCAB // 32), np.int32)
            chunk.sequence.grammar.fill(masks[chunk.sequence.id])
    return masks
