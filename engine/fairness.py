"""Who has been served how much: virtual token counters, one per tenant.

Among waiting sequences of equal priority the one whose tenant has been served least is admitted. A tenant is charged
at admission with the prompt tokens to be computed and the answer expected (at most `expected` tokens), then with each
token beyond those; at the end what was charged but not generated is given back. So no tenant gains by asking for more
than it needs, or less.

The bound. Whoever is admitted ahead of a waiting tenant had been served no more than it, so is ahead by at most one
charge C ≤ window + expected afterwards. Hence a waiting sequence sees at most L + C + max_num_seqs × expected tokens of
new work of any other tenant go first, L being how much more its own tenant has been served than that one. It never
waits for a flood to end, however long the flood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.sequence import Sequence


class FairShares:
    """Served tokens by tenant, kept while the tenant is here or ahead of those who are."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._served: dict[str, int] = {}
        self._present: Counter[str] = Counter()

    def served(self, tenant: str) -> int:
        """Tokens this tenant has been charged; comparable between tenants, of no meaning alone."""
        return self._served.get(tenant, 0)

    def enter(self, sequence: Sequence, waiting: Iterable[str]) -> None:
        """A sequence arrives while these tenants wait; its tenant cannot have saved up service while it was away.

        It starts level with the least served of those who wait, or of those who run when nobody waits.
        """
        tenant = sequence.tenant
        floor = min(map(self.served, waiting), default=None)
        if floor is None:
            floor = min((self._served[name] for name in self._present), default=0)
        self._served[tenant] = max(self.served(tenant), floor)
        self._present[tenant] += 1
        self._prune(floor)

    def admit(self, sequence: Sequence) -> None:
        """Charge the prompt tokens no cache held and the expected answer."""
        computed = sequence.num_prompt - sequence.num_cached
        self._served[sequence.tenant] += computed + self._prepaid(sequence)

    def generated(self, sequence: Sequence) -> None:
        """Charge a token beyond the expected answer."""
        if sequence.num_output > self._prepaid(sequence):
            self._served[sequence.tenant] += 1

    def leave(self, sequence: Sequence, *, admitted: bool) -> None:
        """A sequence ended; give back what it was charged but did not get."""
        tenant = sequence.tenant
        if admitted:
            self._served[tenant] -= max(0, self._prepaid(sequence) - sequence.num_output)
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
        if not self._present:
            self._served.clear()

    def _prepaid(self, sequence: Sequence) -> int:
        return min(sequence.params.max_tokens, self._expected)

    def _prune(self, floor: int) -> None:
        """Forget tenants who are away and would start at the floor anyway: memory follows those who are here."""
        if len(self._served) > 2 * len(self._present) + 64:
            for tenant in [t for t, n in self._served.items() if n <= floor and t not in self._present]:
                del self._served[tenant]
