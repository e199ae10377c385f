"""KV blocks: who holds them, which are free, and which prefix each still contains."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

Spill = Callable[[int, bytes], object]
"""Told of a block whose shared content is about to be overwritten, and its hash."""


class BlockPool:
    """Fixed-size blocks with reference counts; the free list doubles as the LRU prefix cache.

    A freed block keeps its hash and can be found again until it is popped for new content.
    Unhashed blocks go to the front of the free list (reused first), hashed ones to the back.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self._refs = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._reused = [False] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks no sequence holds, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks held by sequences, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Ids of the longest cached prefix; takes no reference."""
        found: list[int] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks sit in the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Take one reference on each found block, reviving those in the free list."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1
            self._reused[block] = True

    def take(self, count: int, spill: Spill = lambda block, digest: None) -> list[int]:
        """Pop `count` blocks for new content; the caller has checked `num_free`.

        `spill` may save what is lost, but hears only of content that was found again at least once: a prompt nobody
        repeated is not worth a copy.
        """
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block, spill)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each block of a table.

        Walks backwards, so that the chain's tail is evicted before the head it depends on.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find a fully computed block; of two equal blocks the first keeps the hash."""
        if self._hash[block] is None and digest not in self._by_hash:
            self._hash[block] = digest
            self._by_hash[digest] = block

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless every block is accounted for by these block tables."""
        held = Counter(block for table in tables for block in table)
        for block, refs in enumerate(self._refs):
            assert refs == held[block], f"block {block}: {refs} references, {held[block]} holders"
            assert (refs == 0) == (block in self._free), f"block {block} is both free and held"
        assert len(self._free) + len(held) == self.num_blocks, "free + referenced != total"
        for digest, block in self._by_hash.items():
            assert self._hash[block] == digest, f"block {block} does not carry its hash"

    def picture(self) -> str:
        """One character a block: `.` free, `c` free but cached, `1` to `9` held so often, `+` more. For any thread."""
        refs, hashes = list(self._refs), list(self._hash)
        free = (".", "c")
        return "".join(
            free[digest is not None] if ref == 0 else str(ref) if ref < 10 else "+"
            for ref, digest in zip(refs, hashes, strict=True)
        )

    def _forget(self, block: int, spill: Spill) -> None:
        digest = self._hash[block]
        if digest is None:
            return
        if self._reused[block]:
            spill(block, digest)
            self._reused[block] = False
        del self._by_hash[digest]
        self._hash[block] = None
        self.evictions += 1
