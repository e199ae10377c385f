"""KV blocks: who holds them, which are free, and which prefix each still contains."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

NEIGHBOURS = 8
"""Blocks on either side that may share a page of 4 KiB with one, as small as keys of one head can be."""
Spill = Callable[[int, bytes], object]
"""Told of a block whose shared content is about to be overwritten, and its hash."""


class BlockPool:
    """Fixed-size blocks with reference counts; the free list doubles as the LRU prefix cache.

    A freed block keeps its hash and can be found again until it is popped for new content.
    Unhashed blocks go to the front of the free list (reused first), hashed ones to the back.

    `limit` withholds the blocks from some number on: the free ones at once, those in use when they are released.
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
        self._usable = num_blocks
        self._withheld: set[int] = set()
        self._new: list[int] = []  # of these, since somebody asked

    @property
    def usable(self) -> int:
        """Blocks that are given out: all, or as many as `limit` left."""
        return self._usable

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached or not."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold, beyond the limit too."""
        return self.num_blocks - len(self._free) - len(self._withheld)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that sequences hold, 0 to 1."""
        return min(1.0, self.num_held / self._usable)

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
            if self._refs[block] == 0 and block >= self._usable:
                self._withhold(block)
            elif self._refs[block] == 0:
                self._free[block] = None
                if self._hash[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find a fully computed block; of two equal blocks the first keeps the hash."""
        if block < self._usable and self._hash[block] is None and digest not in self._by_hash:
            self._hash[block] = digest
            self._by_hash[digest] = block

    def limit(self, usable: int) -> None:
        """Give out the first `usable` blocks only. Prefixes beyond are found no more.

        The caller leaves as many as the longest sequence needs, or that one never ends.
        """
        usable = max(1, min(usable, self.num_blocks))
        for block in range(usable, self._usable):
            self._forget(block, lambda block, digest: None)
            if self._refs[block] == 0:
                del self._free[block]
                self._withhold(block)
        for block in range(self._usable, usable):
            if self._refs[block] == 0:
                self._withheld.remove(block)
                self._free[block] = None
                self._free.move_to_end(block, last=False)
        self._usable = usable

    def newly_withheld(self) -> list[tuple[int, int]]:
        """Runs (first, count) of blocks that were withheld since the last call, each with its nearest neighbours.

        Some of those share a page of memory with it, which only all of them together can give back.
        """
        runs: list[tuple[int, int]] = []
        for block in sorted(self._new):
            end = sum(runs[-1]) if runs else 0
            for near in range(max(block - NEIGHBOURS, end), block + NEIGHBOURS + 1):
                if near not in self._withheld:
                    continue
                if runs and near == sum(runs[-1]):
                    runs[-1] = (runs[-1][0], runs[-1][1] + 1)
                else:
                    runs.append((near, 1))
        self._new = []
        return runs

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless every block is accounted for by these block tables."""
        held = Counter(block for table in tables for block in table)
        for block, refs in enumerate(self._refs):
            assert refs == held[block], f"block {block}: {refs} references, {held[block]} holders"
            idle = block in self._free or block in self._withheld
            assert (refs == 0) == idle, f"block {block} is both free and held"
        assert len(self._free) + len(self._withheld) + len(held) == self.num_blocks, "free + referenced != total"
        assert all(block < self._usable for block in self._free), "a block beyond the limit is free"
        assert all(block >= self._usable for block in self._withheld), "a block within the limit is withheld"
        for digest, block in self._by_hash.items():
            assert self._hash[block] == digest, f"block {block} does not carry its hash"

    def picture(self) -> str:
        """One character a block, for any thread.

        `.` free, `c` free but cached, `1` to `9` held so often, `+` more, `-` withheld.
        """
        refs, hashes, usable = list(self._refs), list(self._hash), self._usable
        free = (".", "c")
        return "".join(
            str(ref) if 0 < ref < 10 else "+" if ref else "-" if block >= usable else free[digest is not None]
            for block, (ref, digest) in enumerate(zip(refs, hashes, strict=True))
        )

    def _withhold(self, block: int) -> None:
        self._withheld.add(block)
        self._new.append(block)

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
