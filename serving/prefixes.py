"""Which replica probably has the beginning of a prompt in its prefix cache, judged by what was sent where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

BLOCK = 256  # characters; some engine blocks' worth of text
MAX_BLOCKS = 256  # looked at of one prompt
BLOCKS_PER_REPLICA = 16_384  # four million characters, about a million tokens
MAX_REPLICAS = 256


class PrefixIndex:
    """A bounded least-recently-used set of block hashes for each replica.

    Each hash covers a block and all before it, salted by the tenant as the engines' caches are. It lives in one process
    and is a guess: an engine may have evicted what is expected here. Memory is bounded by
    MAX_REPLICAS * BLOCKS_PER_REPLICA hashes.
    """

    def __init__(self, blocks_per_replica: int = BLOCKS_PER_REPLICA) -> None:
        self._bound = blocks_per_replica
        self._replicas: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()
        self._launches: dict[str, int] = {}

    def expected(self, tenant_id: str, text: str) -> dict[str, int]:
        """Characters of the beginning of `text` that each replica probably has; replicas without any are left out."""
        found: dict[str, int] = {}
        alive = list(self._replicas.items())
        for count, block in enumerate(_blocks(tenant_id, text), 1):
            alive = [(replica_id, seen) for replica_id, seen in alive if block in seen]
            if not alive:
                break
            for replica_id, _ in alive:
                found[replica_id] = count * BLOCK
        return found

    def note(self, replica_id: str, tenant_id: str, text: str) -> None:
        """A prompt has been sent to a replica."""
        blocks = list(_blocks(tenant_id, text))
        if not blocks:
            return
        seen = self._replicas.setdefault(replica_id, OrderedDict())
        self._replicas.move_to_end(replica_id)
        for block in reversed(blocks):  # the last ones are the first to go: what follows a gap can never be found
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._bound:
            seen.popitem(last=False)
        if len(self._replicas) > MAX_REPLICAS:
            self._replicas.popitem(last=False)

    def prune(self, launches: Mapping[str, int]) -> None:
        """Keep only these replicas (id to launch epoch); one that was started anew begins without a cache."""
        for replica_id in list(self._replicas):
            epoch, before = launches.get(replica_id), self._launches.get(replica_id)
            if epoch is None or (before is not None and before != epoch):
                del self._replicas[replica_id]
        self._launches = dict(launches)

    def __len__(self) -> int:
        """Hashes held."""
        return sum(len(seen) for seen in self._replicas.values())


def _blocks(tenant_id: str, text: str) -> Iterator[int]:
    """Chained hashes of the whole blocks; the process's own seed keeps anybody from aiming at collisions."""
    chain = hash(tenant_id)
    for start in range(0, min(len(text) - BLOCK, (MAX_BLOCKS - 1) * BLOCK) + 1, BLOCK):
        chain = hash((chain, text[start : start + BLOCK]))
        yield chain
